#include "flatshard/plan/svg.h"

#include "tests/plan/round_gpu.h"
#include "tests/plan/small_job.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <stack>
#include <string>

namespace flatshard::plan {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

/// Returns whether every tag is closed by its own, and no text has bare < or &.
::testing::AssertionResult is_well_formed(const std::string& xml) {
  std::stack<std::string> open;
  for (std::size_t at = 0; at < xml.size(); ++at) {
    if (xml[at] == '&') {
      const std::size_t end = xml.find(';', at);
      if (end == std::string::npos || end - at > 6) {
        return ::testing::AssertionFailure() << "bare & at " << at;
      }
    }
    if (xml[at] != '<') {
      continue;
    }
    const std::size_t end = xml.find('>', at);
    if (end == std::string::npos) {
      return ::testing::AssertionFailure() << "open < at " << at;
    }
    const std::string tag = xml.substr(at + 1, end - at - 1);
    const std::string name = tag.substr(
        tag[0] == '/' ? 1 : 0,
        tag.find_first_of(" \n/", 1) - (tag[0] == '/' ? 1 : 0));
    if (tag[0] == '/') {
      if (open.empty() || open.top() != tag.substr(1)) {
        return ::testing::AssertionFailure() << "</" << tag << "> is not open";
      }
      open.pop();
    } else if (tag.back() != '/') {
      open.push(name);
    }
    at = end;
  }
  return open.empty() ? ::testing::AssertionSuccess()
                      : ::testing::AssertionFailure()
                            << "<" << open.top() << "> is not closed";
}

TEST(Svg, DrawsTheExchangesOfRanksThatShareLayers) {
  Job job = small_job(3, 2);
  job.tensor_ranks = 2;
  job.layer_kinds[0].nodes[PlanNode::attend].forward = {
      Kernel::exchange(Transfer::all_gather, 1e9),
      Kernel::memory("norm", 1e9)};
  const std::string svg =
      to_svg(plan_step(job, plan_units(job), round_gpu()), "a step");
  EXPECT_TRUE(is_well_formed(svg));
  EXPECT_THAT(svg, HasSubstr(">tensor par.</text>"));
  EXPECT_THAT(svg, HasSubstr(">tensor parallelism</text>"));
  EXPECT_THAT(svg, HasSubstr("TP all-gather of unit 2"));
  job.layer_kinds[0].nodes[PlanNode::attend].forward.erase(
      job.layer_kinds[0].nodes[PlanNode::attend].forward.begin());
  const std::string without =
      to_svg(plan_step(job, plan_units(job), round_gpu()), "a step");
  EXPECT_THAT(without, Not(HasSubstr("tensor par")));
  EXPECT_THAT(without, Not(HasSubstr(".t {")));
}

/// Returns the right end of a bar in pixels: x and width after `title`'s rect.
double end_of_bar(const std::string& svg, const std::string& style) {
  const std::size_t rect = svg.find("<rect class=\"" + style + "\" x=\"");
  EXPECT_NE(rect, std::string::npos) << style;
  const auto number = [&](const std::string& name) {
    const std::size_t at = svg.find(name + "=\"", rect) + name.size() + 2;
    return std::stod(svg.substr(at));
  };
  return number("x") + number("width");
}

TEST(Svg, TheAxisEndsWithTheStepWhateverBoundsIt) {
  constexpr double kAxisEnd = 1280 - 24;
  const Job job = small_job(3, 2);
  const StepPlan step = plan_step(job, plan_units(job), round_gpu());
  for (const double host : {0.25, 4.0}) {
    StepPlan bound = step;
    bound.shown_host_seconds = host * step.device_seconds;
    bound.shown_seconds = std::max(1.0, host) * step.device_seconds;
    const std::string svg = to_svg(bound, "a step");
    EXPECT_TRUE(is_well_formed(svg));
    EXPECT_THAT(svg, HasSubstr(">host</text>"));
    EXPECT_THAT(
        svg,
        HasSubstr(fmt::format(
            "host: {:.3f} ms to launch the step",
            1e3 * bound.shown_host_seconds)));
    const double share = std::min(1.0, host);
    EXPECT_NEAR(
        end_of_bar(svg, "h"),
        112 + share * (kAxisEnd - 112),
        1.1);  // a gap of a pixel
  }
}

TEST(Svg, DrawsEachStreamThatIsUsed) {
  Job job = small_job(3, 2);
  NodeWork& node = job.layer_kinds[0].nodes[PlanNode::attend];
  node.forward.push_back(Kernel::memory("norm", 1e9));
  node.backward.push_back(Kernel::memory("norm", 2e9));
  Gpu gpu = round_gpu();
  gpu.nvlink.all_gather.rates = {2e-6};
  gpu.nvlink.reduce_scatter.rates = {2e-6};
  const std::string svg = to_svg(
      plan_step(job, plan_units(job), gpu),
      "a <model> & ranks",
      "a step");
  EXPECT_TRUE(is_well_formed(svg));
  EXPECT_THAT(svg, HasSubstr("a &lt;model&gt; &amp; ranks"));
  EXPECT_THAT(svg, HasSubstr("width=\"1280\""));
  EXPECT_THAT(svg, HasSubstr("prefers-color-scheme: dark"));
  EXPECT_THAT(svg, HasSubstr(">compute</text>"));
  EXPECT_THAT(svg, HasSubstr(">gather</text>"));
  EXPECT_THAT(svg, HasSubstr(">reduce</text>"));
  EXPECT_THAT(svg, Not(HasSubstr(">exchange</text>")));
  EXPECT_THAT(svg, HasSubstr("all-gather of unit 2"));
  EXPECT_THAT(svg, HasSubstr(">ms</text>"));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
}

}  // namespace
}  // namespace flatshard::plan
