#include "flatshard/buffer/transition.h"

#include <fmt/ranges.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flatshard/core/error.h"
#include "tests/buffer/placements.h"

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using testing::PA;
using testing::PS;
using testing::R;
using testing::S;
using Kind = TransitionStep::Kind;

// E.g. "reduce_scatter(1) all_reduce(0)".
std::string steps_of(const Placements& from, const Placements& to) {
  std::string text;
  for (const TransitionStep& step : plan_transition(from, to)) {
    text += fmt::format(
        "{}{}({})",
        text.empty() ? "" : " ",
        to_string(step.kind),
        fmt::join(step.axes, ","));
  }
  return text;
}

std::string message_of(const Placements& from, const Placements& to) {
  try {
    plan_transition(from, to);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    return error.what();
  }
  return "no error";
}

TEST(Transition, OneAxis) {
  EXPECT_EQ(steps_of({S}, {R}), "all_gather(0)");
  EXPECT_EQ(steps_of({PA}, {R}), "all_reduce(0)");
  EXPECT_EQ(steps_of({PA}, {S}), "reduce_scatter(0)");
  EXPECT_EQ(steps_of({R}, {S}), "slice(0)");
  EXPECT_EQ(steps_of({R}, {PA}), "relabel(0)");
  for (const Placement& same : {R, S, PA, PS}) {
    EXPECT_EQ(steps_of({same}, {same}), "");
  }
}

TEST(Transition, SeveralAxes) {
  // Full sharding over two axes is one collective over the flattened group.
  EXPECT_EQ(steps_of({S, S}, {R, R}), "all_gather(0,1)");
  EXPECT_EQ(steps_of({PA, PA}, {S, S}), "reduce_scatter(0,1)");
  EXPECT_EQ(steps_of({PA, PA}, {R, R}), "all_reduce(0,1)");
  // HSDP and HFSDP.
  EXPECT_EQ(steps_of({PA, PA}, {R, S}), "reduce_scatter(1) all_reduce(0)");
  EXPECT_EQ(steps_of({PA, PA}, {PA, S}), "reduce_scatter(1)");
  EXPECT_EQ(steps_of({PA, S}, {R, S}), "all_reduce(0)");
  EXPECT_EQ(steps_of({PA, S}, {S, S}), "reduce_scatter(0)");
  EXPECT_EQ(steps_of({S, S}, {R, S}), "all_gather(0)");
  // ZeRO-1 under an outer axis.
  EXPECT_EQ(steps_of({R, R}, {R, S}), "slice(1)");
  // Mixed: slice from the inner axis outward, reduce small, all-gather last.
  EXPECT_EQ(steps_of({R, PA}, {S, S}), "reduce_scatter(1) slice(0)");
  EXPECT_EQ(steps_of({PA, R}, {S, S}), "slice(1) reduce_scatter(0)");
  EXPECT_EQ(steps_of({PA, S}, {R, R}), "all_reduce(0) all_gather(1)");
  EXPECT_EQ(steps_of({R, S}, {PA, S}), "relabel(0)");
  EXPECT_EQ(steps_of({PA, R}, {R, PA}), "all_reduce(0) relabel(1)");
  EXPECT_EQ(
      steps_of({PA, R, PA}, {S, S, S}),
      "reduce_scatter(2) slice(1) reduce_scatter(0)");
  EXPECT_EQ(steps_of({S, S, S}, {R, R, S}), "all_gather(0,1)");
}

TEST(Transition, OperationsThatDifferAreStepsOfTheirOwn) {
  EXPECT_EQ(steps_of({PS, PA}, {R, R}), "all_reduce(1) all_reduce(0)");
  const auto steps = plan_transition({PS, PA}, {S, S});
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[0].op, ReduceOp::avg);
  EXPECT_EQ(steps[0].after, (Placements{PS, S}));
  EXPECT_EQ(steps[1].op, ReduceOp::sum);
  EXPECT_EQ(steps[1].after, (Placements{S, S}));
}

TEST(Transition, RefusedPairsNameBothPlacements) {
  EXPECT_THAT(
      message_of({S}, {PA}),
      HasSubstr("cannot redistribute from [Shard] to [Partial(avg)]: axis 0 "
                "cannot change from Shard to Partial(avg)"));
  EXPECT_THAT(
      message_of({R, S}, {PS, S}),
      HasSubstr("cannot redistribute from [Replicate, Shard] to "
                "[Partial(sum), Shard]: axis 0 cannot change from Replicate "
                "to Partial(sum)"));
  EXPECT_THAT(
      message_of({PA}, {PS}),
      HasSubstr("axis 0 cannot change from Partial(avg) to Partial(sum)"));
  EXPECT_THAT(
      message_of({S}, {R, R}),
      HasSubstr("from [Shard] to [Replicate, Replicate]: expected one "
                "placement per mesh axis"));
  EXPECT_THAT(
      message_of({S, S}, {S, R}),
      HasSubstr("in [Shard, Replicate] the sharded axes are not the innermost "
                "ones"));
}

}  // namespace
}  // namespace flatshard
