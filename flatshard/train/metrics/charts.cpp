#include "flatshard/train/metrics/charts.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "flatshard/train/metrics/metric_table.h"

namespace flatshard {
namespace {

using Json = nlohmann::ordered_json;

constexpr Chart kCharts[] = {
    {.title = "Loss",
     .unit = "nats per token",
     .is_wide = true,
     .has_log = true,
     .has_events = true,
     .settles = true},
    {.title = "Validation loss",
     .unit = "nats per token",
     .has_log = true,
     .parts = "validation_losses."},
    {.title = "Bits per byte", .unit = "of the validation text"},
    {.title = "Gradient norm",
     .unit = "before clipping",
     .has_log = true,
     .settles = true,
     .reference_key = "training.max_norm"},
    {.title = "Learning rate", .has_zero = true, .has_log = true},
    {.title = "Throughput",
     .unit = "tokens per second, all ranks",
     .has_zero = true,
     .counts = true},
    {.title = "Model FLOPs utilization",
     .unit = "% of the GPU's peak",
     .has_zero = true},
    // If the peak is known, the utilization has the same shape.
    {.title = "Model FLOP/s",
     .unit = "TFLOP/s per rank",
     .has_zero = true,
     .without = "mfu"},
    {.title = "Memory",
     .unit = "GiB, rank 0",
     .has_zero = true,
     .reference_metric = "memory_total_bytes",
     .reference_label = "the device's memory"},
    {.title = "Time of a step", .unit = "ms", .has_zero = true},
    {.title = "Waiting time", .unit = "ms per step", .has_zero = true},
    {.title = "Busiest expert", .unit = "tokens, as a multiple of the mean"},
    {.title = "Dropped tokens",
     .unit = "% of the choices of experts",
     .has_zero = true},
    {.title = "Load-balancing loss", .unit = "before its coefficient"},
    {.title = "Router bias", .unit = "largest magnitude"}};

/// Adds the lines of a chart from a table of metrics.
/// @param table  of the report's data: where the metric's values are.
template <class Values>
void add_lines(
    const Chart& chart,
    std::span<const Metric<Values>> metrics,
    const char* table,
    std::vector<std::pair<int, Json>>& lines) {
  for (const Metric<Values>& metric : metrics) {
    for (const ChartLine& line : metric.lines) {
      if (line.chart == chart.title) {
        lines.emplace_back(
            line.color,
            Json{
                {"name", metric.key},
                {"table", table},
                {"label", line.label},
                {"color", line.color},
                {"scale", line.scale},
                {"rough", line.is_rough}});
      }
    }
  }
}

Json columns_of(const Chart& chart) {
  std::vector<std::pair<int, Json>> lines;
  add_lines(chart, step_metrics(), "training", lines);
  add_lines(chart, validation_metrics(), "validation", lines);
  std::ranges::stable_sort(lines, {}, &std::pair<int, Json>::first);
  Json columns = Json::array();
  for (auto& [color, line] : lines) {
    columns.push_back(std::move(line));
  }
  return columns;
}

}  // namespace

std::span<const Chart> charts() {
  return kCharts;
}

std::string charts_json() {
  Json all = Json::array();
  for (const Chart& chart : kCharts) {
    Json& json = all.emplace_back(Json{
        {"title", chart.title},
        {"unit", chart.unit},
        {"wide", chart.is_wide},
        {"zero", chart.has_zero},
        {"events", chart.has_events},
        {"settles", chart.settles},
        {"counts", chart.counts},
        {"columns", columns_of(chart)}});
    if (chart.has_log) {
      json["log"] = false;  // at first
    }
    const std::pair<const char*, std::string_view> texts[] = {
        {"without", chart.without},
        {"parts", chart.parts},
        {"reference_key", chart.reference_key},
        {"reference_metric", chart.reference_metric},
        {"reference_label", chart.reference_label}};
    for (const auto& [name, text] : texts) {
      if (!text.empty()) {
        json[name] = text;
      }
    }
  }
  return all.dump();
}

}  // namespace flatshard
