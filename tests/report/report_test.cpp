#include "flatshard/report/report.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/support/temp_folder.h"

namespace flatshard::report {
namespace {

using nlohmann::json;

class Report : public ::testing::Test {
 protected:
  /// Writes a run with this number of steps. @return its folder.
  std::string run(
      const std::string& name,
      int steps,
      const std::string& config = "[optimizer]\nlr = 0.5\n") const {
    std::string rows;
    for (int step = 1; step <= steps; ++step) {
      rows += fmt::format(
          "{{\"step\":{},\"time\":\"2026-01-01T00:00:00.000Z\","
          "\"loss\":{:.6f},\"tokens\":{}}}\n",
          step,
          step == steps / 3 ? 77.0 : 2 + std::sin(step),
          8 * step);
    }
    folder_.write(name + "/metrics.jsonl", rows);
    folder_.write(name + "/config.toml", config);
    return (folder_ / name).string();
  }

  /// Returns the JSON that stands in a page.
  static json data_of(const std::string& page) {
    const std::string begin = R"(id="data">)";
    const std::size_t from = page.find(begin) + begin.size();
    return json::parse(page.substr(from, page.find("</script>", from) - from));
  }

  const TempFolder folder_;
};

TEST_F(Report, JsonHasAllRowsAndWhatIsNotByDefault) {
  const json all = json::parse(report_json(
      {.run = run("a", 3000),
       .compare = {run("b", 2, "[optimizer]\nlr = 0.25\nname = \"x\"\n")},
       .default_config = "[optimizer]\nlr = 0.5\nname = \"x\"\n"}));
  EXPECT_EQ(all["format"], "flatshard report");
  ASSERT_EQ(all["runs"].size(), 2U);
  const json& a = all["runs"][0];
  EXPECT_EQ(a["name"], "a");
  EXPECT_EQ(a["training"]["step"].size(), 3000U);
  EXPECT_EQ(a["training"]["columns"]["loss"].size(), 3000U);
  EXPECT_FALSE(a["training"].contains("max"));
  EXPECT_EQ(a["changed"], json::array());
  EXPECT_EQ(all["runs"][1]["changed"], json::parse(R"(["optimizer.lr"])"));
  EXPECT_EQ(all["runs"][1]["config"]["optimizer.lr"], 0.25);
}

// The config of a run has values that its ranks gave, too.
TEST_F(Report, KeysThatARunDidNotSetAreNotListedAsSet) {
  const std::string folder =
      run("a", 2, "[optimizer]\nlr = 0.25\nname = \"y\"\n");
  folder_.write(
      "a/metrics.jsonl",
      R"({"step":0,"start":{"steps":2,"changed_keys":["optimizer.lr"]}})"
      "\n"
      R"({"step":1,"loss":1.5})"
      "\n");
  const json all = json::parse(report_json(
      {.run = folder,
       .default_config = "[optimizer]\nlr = 0.5\nname = \"x\"\n"}));
  EXPECT_EQ(all["runs"][0]["changed"], json::parse(R"(["optimizer.lr"])"));
}

TEST_F(Report, APageOfALongRunStaysSmallAndKeepsItsExtremes) {
  const std::string page = report_page({.run = run("long", 30000)});
  const json data = data_of(page);
  const json& training = data["runs"][0]["training"];
  EXPECT_LE(training["step"].size(), 1000U);
  EXPECT_EQ(training["step"].back(), 30000);
  EXPECT_EQ(training["num_rows"], 30000);
  EXPECT_EQ(training["last"]["tokens"], 240000);
  double highest = 0;
  for (const json& value : training["max"]["loss"]) {
    highest = std::max(highest, value.get<double>());
  }
  EXPECT_EQ(highest, 77);
  EXPECT_FALSE(training["max"].contains("tokens"));
  EXPECT_LT(page.size(), 200'000U);
}

TEST_F(Report, APageNeedsNothingElse) {
  const std::string page = report_page({.run = run("a", 3)});
  for (const char* part :
       {"<title>a - Flatshard report</title>",
        "default-src 'none'",
        "prefers-color-scheme: dark",
        "class Chart"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
  for (const char* part : {"href=\"page.css", "src=\"page.js", "<script src"}) {
    EXPECT_EQ(page.find(part), std::string::npos) << part;
  }
  // Namespaces of XML are names and no addresses to load from.
  std::size_t addresses = 0;
  for (std::size_t at = page.find("://"); at != std::string::npos;
       at = page.find("://", at + 1)) {
    ++addresses;
    EXPECT_EQ(page.substr(at + 3, 11), "www.w3.org/");
  }
  EXPECT_EQ(addresses, 1U);
}

TEST_F(Report, NamesCannotEndTheScriptOrBecomeTags) {
  const std::string evil = "</script><script>alert(1)</script>&";
  const std::string page = report_page(
      {.run = run("x<b>&y", 3, fmt::format("[data]\ntrain = '{}'\n", evil))});
  EXPECT_EQ(page.find("<script>alert"), std::string::npos);
  EXPECT_NE(
      page.find("<title>x&lt;b&gt;&amp;y - Flatshard report</title>"),
      std::string::npos);
  const json data = data_of(page);
  EXPECT_EQ(data["runs"][0]["config"]["data.train"], evil);
  EXPECT_EQ(data["runs"][0]["name"], "x<b>&y");
}

TEST_F(Report, RunsAreNamedByWhatTellsThemApart) {
  const auto names = [](const ReportOptions& options) {
    const json all = json::parse(report_json(options));
    std::string text;
    for (const json& each : all["runs"]) {
      text += each["name"].get<std::string>() + " ";
    }
    return text;
  };
  const std::string a = run("a/one", 1);
  const std::string b = run("b/one", 1);
  const std::string c = run("c/run", 1);
  EXPECT_EQ(names({.run = a}), "one ");
  EXPECT_EQ(names({.run = a + "/"}), "one ");
  EXPECT_EQ(names({.run = a, .compare = {b}}), "a/one b/one ");
  EXPECT_EQ(names({.run = c}), "c/run ");
}

TEST_F(Report, AValueThatIsNotFiniteIsNull) {
  folder_.write(
      "n/metrics.jsonl",
      "{\"step\":1,\"loss\":null,\"not_finite\":{\"loss\":\"nan\"}}\n"
      "{\"step\":2,\"loss\":1.5}\n");
  const json all = json::parse(report_json({.run = (folder_ / "n").string()}));
  const json& training = all["runs"][0]["training"];
  EXPECT_EQ(training["columns"]["loss"], json::parse("[null, 1.5]"));
  EXPECT_EQ(training["last"]["loss"], 1.5);
}

}  // namespace
}  // namespace flatshard::report
