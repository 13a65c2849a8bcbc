// The steps of a gradient's reduction, by strategy and microbatch.
#include "flatshard/group/gradient_pipeline.h"

#include "tests/group/groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard::testing {
namespace {

using ::testing::ElementsAre;

// E.g. "inner + inner": the path, and what waits and is added to.
std::string to_string(const GradientPipeline::Reduction& r) {
  using Path = GradientPipeline::Path;
  std::string text;
  switch (r.path) {
    case Path::local:
      text = "local";
      break;
    case Path::inner:
      text = "inner";
      break;
    case Path::rest:
      text = "rest";
      break;
    case Path::outer:
      text = "outer";
      break;
    case Path::outer_of_slot:
      text = "outer of slot";
      break;
  }
  return text + (r.adds.local ? " + local" : "") +
         (r.adds.inner ? " + inner" : "") +
         (r.adds.reduced ? " + reduced" : "");
}

// Returns the paths of two microbatches that reduce, or of which the first
// accumulates (no_sync).
std::vector<std::string> paths(const GroupCase& c, bool accumulates) {
  std::vector<std::string> paths;
  run_ranks(c.world(), [&](RankContext& context) {
    const auto group = make_group(c, context.mesh(c.axes()));
    const at::Tensor slot = at::zeros({group->layout().numel()});
    std::vector<std::string> own;
    for (const bool is_last : {false, true}) {
      const auto reduction =
          group->plan_reduction(!accumulates || is_last, is_last);
      group->gradients().reduce(slot, reduction);
      own.push_back(to_string(reduction));
    }
    if (context.rank == 0) {
      paths = own;
    }
  });
  return paths;
}

TEST(GradientPipeline, OneReductionOverAllAxes) {
  for (const GroupCase& c :
       {GroupCase{"zero2", {3}}, {"zero3", {4}}, {"zero3", {2, 2}}}) {
    EXPECT_THAT(paths(c, false), ElementsAre("rest", "rest + reduced")) << c;
    EXPECT_THAT(paths(c, true), ElementsAre("local", "rest + local")) << c;
  }
}

TEST(GradientPipeline, AccumulatedGradientsAreReducedOnce) {
  for (const GroupCase& c :
       {GroupCase{"zero0", {2}}, {"zero1", {2}}, {"zero1", {2, 2}}}) {
    EXPECT_THAT(paths(c, true), ElementsAre("local", "rest + local")) << c;
  }
}

TEST(GradientPipeline, OuterAxesAreReducedInTheLastMicrobatch) {
  for (const GroupCase& c :
       {GroupCase{"hsdp", {2, 2}}, {"hfsdp", {2, 2}}, {"hsdp_zero2", {2, 2}}}) {
    EXPECT_THAT(paths(c, false), ElementsAre("inner", "outer + inner")) << c;
    EXPECT_THAT(paths(c, true), ElementsAre("local", "outer + local")) << c;
  }
}

}  // namespace
}  // namespace flatshard::testing
