#include "flatshard/train/metrics/metric_table.h"

#include "flatshard/train/metrics/charts.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

namespace flatshard {
namespace {

using ::testing::HasSubstr;

/// Calls `see` with each row of both tables.
template <class See>
void for_each_metric(const See& see) {
  for (const auto& metric : step_metrics()) {
    see(metric);
  }
  for (const auto& metric : validation_metrics()) {
    see(metric);
  }
}

TEST(MetricTable, NamesAreUniqueAndChartsExist) {
  std::set<std::string_view> titles;
  for (const Chart& chart : charts()) {
    EXPECT_TRUE(titles.insert(chart.title).second) << chart.title;
  }
  std::set<std::string_view> keys;
  std::set<std::string_view> tags;
  std::set<std::string_view> drawn;
  for_each_metric([&](const auto& metric) {
    EXPECT_TRUE(keys.insert(metric.key).second) << metric.key;
    EXPECT_TRUE(metric.tag.empty() || tags.insert(metric.tag).second)
        << metric.tag;
    for (const ChartLine& line : metric.lines) {
      EXPECT_TRUE(titles.contains(line.chart)) << metric.key;
      drawn.insert(line.chart);
    }
  });
  EXPECT_EQ(drawn, titles);
  for (const Chart& chart : charts()) {
    for (const auto name : {chart.without, chart.reference_metric}) {
      EXPECT_TRUE(name.empty() || keys.contains(name)) << chart.title;
    }
  }
}

TEST(MetricTable, ThePageHasEachRow) {
  std::ifstream file(FLATSHARD_DOCS "/reference/log_and_metrics.md");
  const std::string page(std::istreambuf_iterator<char>(file), {});
  std::string steps;
  for (const auto& metric : step_metrics()) {
    steps += fmt::format("- `{}`: {}\n", metric.key, metric.help);
  }
  EXPECT_THAT(page, HasSubstr("on rank 0:\n\n" + steps + "\n"));
  std::string validations;
  for (const auto& metric : validation_metrics()) {
    validations += fmt::format("- `{}`: {}\n", metric.key, metric.help);
  }
  EXPECT_THAT(page, HasSubstr("(`validation.freq`):\n\n" + validations));
}

TEST(MetricTable, LinesOfAChartAreInTheOrderOfTheirColors) {
  const auto json = nlohmann::json::parse(charts_json());
  ASSERT_EQ(json.size(), charts().size());
  for (const auto& chart : json) {
    int last = -1;
    EXPECT_FALSE(chart["columns"].empty()) << chart;
    for (const auto& column : chart["columns"]) {
      EXPECT_GT(column["color"].get<int>(), last) << chart;
      last = column["color"].get<int>();
    }
  }
}

TEST(MetricTable, ARowWithoutAValueIsNullOrLeftOut) {
  const StepMetrics none;
  const ValidationMetrics validation;
  for (const auto& metric : step_metrics()) {
    const bool is_optional = metric.null_if_unset ||
                             metric.key.starts_with("experts.") ||
                             metric.key.starts_with("startup.");
    EXPECT_EQ(metric.value(none).has_value(), !is_optional) << metric.key;
  }
  for (const auto& metric : validation_metrics()) {
    EXPECT_EQ(
        metric.value(validation).has_value(),
        metric.key != "bits_per_byte");
  }
}

}  // namespace
}  // namespace flatshard
