// Units that keep a slice of their weights between forward and backward.
#include "flatshard/schedule/scheduler.h"
#include "flatshard/schedule/simulate.h"
#include "flatshard/schedule/slot_plan.h"
#include "tests/schedule/blocks.h"

#include "flatshard/core/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr PlaneId kSlice = 1;
constexpr std::int64_t kSliceNbytes = testing::kUnit / 2;

std::vector<UnitSpec> sliced_blocks(int n) {
  std::vector<UnitSpec> units = testing::blocks(n);
  for (UnitSpec& unit : units) {
    if (!unit.weights_nbytes.empty()) {
      unit.weights_nbytes = {testing::kUnit, kSliceNbytes};
      unit.forward_reads = unit.backward_reads = {0};
      unit.post_forward = kSlice;
    }
  }
  return units;
}

std::string feed(Scheduler& s, const ScheduleEvent& event) {
  return to_string(s.on(event));
}

std::string forward(Scheduler& s, UnitId unit, bool needs_backward = true) {
  const std::string begin =
      feed(s, {.kind = EventKind::forward_begin, .unit = unit, .call = unit});
  return begin + " | " +
         feed(
             s,
             {.kind = EventKind::forward_end,
              .unit = unit,
              .call = unit,
              .needs_backward = needs_backward});
}

TEST(PostForward, GoldenStep) {
  EXPECT_EQ(
      to_string(simulate_step(sliced_blocks(3), {.prefetch = 1})),
      "gather(1) gather(2) await(1) derive(1.1) release(1) "
      "gather(3) await(2) derive(2.1) release(2) "
      "await(3) "  // ran last: stays whole
      "gather'(2 post_forward) acquire_grads(3) release(3) "
      "gather'(1 post_forward) await(2) release(2.1) reduce(3) "
      "acquire_grads(2) release(2) "
      "await(1) release(1.1) reduce(2) drain(3) acquire_grads(1) release(1) "
      "reduce(1) drain(2) drain(1) join");
}

// Only planes with a slice are all-gathered from it; slices end with the step.
TEST(PostForward, EverySliceIsMadeBeforeAndReleasedAfterItsGather) {
  for (const int prefetch : {0, 1, 2, 5}) {
    std::vector<int> slices(5);
    for (const Action& a :
         simulate_step(sliced_blocks(4), {.prefetch = prefetch})) {
      if (a.plane == kSlice) {
        slices[a.unit] += a.kind == ActionKind::derive ? 1 : -1;
      }
      if (a.kind == ActionKind::gather) {
        EXPECT_EQ(a.from_post_forward, slices[a.unit] == 1);
        EXPECT_EQ(a.from_post_forward, a.phase == Phase::backward);
      }
    }
    EXPECT_EQ(slices, std::vector<int>(5));
  }
}

TEST(PostForward, SlotsAreAsLargeAsTheSlices) {
  const auto units = sliced_blocks(3);
  const auto actions = simulate_step(units, {.prefetch = 1});
  int slices = 0;
  for (const SlotLifetime& life : slot_lifetimes(units, actions)) {
    if (life.key.plane == kSlice) {
      ++slices;
      EXPECT_EQ(life.nbytes, kSliceNbytes);
      EXPECT_EQ(life.key.role, SlotRole::forward_weights);
    }
  }
  EXPECT_EQ(slices, 2);
}

TEST(PostForward, AForwardWithoutABackwardKeepsNothing) {
  Scheduler s(sliced_blocks(2), {.prefetch = 0});
  feed(s, {.kind = EventKind::forward_begin, .unit = 0, .call = 0});
  EXPECT_THAT(forward(s, 1, false), Not(HasSubstr("derive")));
  EXPECT_EQ(s.num_gathered(), 0);
  EXPECT_TRUE(s.gathered_planes(1).empty());
}

TEST(PostForward, ASecondForwardGathersFromTheSlice) {
  Scheduler s(sliced_blocks(2), {.prefetch = 0});
  feed(s, {.kind = EventKind::forward_begin, .unit = 0, .call = 0});
  EXPECT_EQ(forward(s, 1), "gather(1) await(1) | derive(1.1) release(1)");
  EXPECT_EQ(s.num_gathered(), 0);
  EXPECT_EQ(
      forward(s, 1),
      "gather(1 post_forward) await(1) release(1.1) | derive(1.1) release(1)");
}

TEST(PostForward, WhoeverChangesWeightsEndsSlices) {
  for (const auto kind :
       {EventKind::weights_changed,
        EventKind::unit_written,
        EventKind::reshard,
        EventKind::reset}) {
    Scheduler s(sliced_blocks(2), {.prefetch = 0});
    feed(s, {.kind = EventKind::forward_begin, .unit = 0, .call = 0});
    forward(s, 1);
    forward(s, 2);
    feed(s, {.kind = EventKind::forward_end, .unit = 0, .call = 0});
    EXPECT_THAT(feed(s, {.kind = kind, .unit = 1}), HasSubstr("release(1.1)"));
    EXPECT_TRUE(s.gathered_planes(1).empty());
  }
}

TEST(PostForward, ThePolicyDecides) {
  for (const UnitPolicy& policy :
       {UnitPolicy{.reshard_after_forward = false},
        UnitPolicy{.unshard_in_backward = false},
        UnitPolicy{.keep_post_forward = false}}) {
    auto units = sliced_blocks(3);
    for (UnitSpec& unit : units) {
      unit.policy = policy;
    }
    for (const Action& a : simulate_step(units, {.prefetch = 1})) {
      EXPECT_EQ(a.plane, 0);
      EXPECT_FALSE(a.from_post_forward);
    }
  }
}

// Unit 2 was in no backward: its slice is freed at that backward's end.
TEST(PostForward, AUnitWithoutABackwardRests) {
  Scheduler s(sliced_blocks(3), {.prefetch = 0});
  feed(s, {.kind = EventKind::forward_begin, .unit = 0, .call = 0});
  for (const UnitId unit : {1, 2, 3}) {
    forward(s, unit);
  }
  feed(
      s,
      {.kind = EventKind::forward_end,
       .unit = 0,
       .call = 0,
       .needs_backward = true});
  EXPECT_EQ(s.num_gathered(), 1);
  feed(
      s,
      {.kind = EventKind::task_begin,
       .task = 1,
       .expected = {{1, 1}},
       .calls = {{1, 1}}});
  EXPECT_EQ(
      feed(
          s,
          {.kind = EventKind::backward_begin, .unit = 1, .call = 1, .task = 1}),
      "gather'(1 post_forward) await(1) release(1.1) acquire_grads(1)");
  feed(s, {.kind = EventKind::wgrad_done, .unit = 1, .task = 1});
  const std::string end =
      feed(s, {.kind = EventKind::task_end, .task = 1, .outermost = true});
  EXPECT_THAT(end, HasSubstr("release(2.1)"));
  EXPECT_TRUE(s.resting());
}

// The recompute of a checkpoint uses the all-gather of its unit's backward.
TEST(PostForward, ARecomputeGathersFromTheSlice) {
  Scheduler s(sliced_blocks(2), {.prefetch = 0});
  feed(s, {.kind = EventKind::forward_begin, .unit = 0, .call = 0});
  forward(s, 1);
  forward(s, 2);
  feed(
      s,
      {.kind = EventKind::forward_end,
       .unit = 0,
       .call = 0,
       .needs_backward = true});
  feed(
      s,
      {.kind = EventKind::task_begin,
       .task = 1,
       .expected = {{1, 1}},
       .calls = {{1, 1}}});
  EXPECT_EQ(
      feed(s, {.kind = EventKind::recompute_begin, .unit = 1, .call = 7}),
      "gather'(1 post_forward) await(1) release(1.1)");
  EXPECT_EQ(
      feed(s, {.kind = EventKind::recompute_end, .unit = 1, .call = 7}),
      "");
  EXPECT_EQ(
      feed(
          s,
          {.kind = EventKind::backward_begin, .unit = 1, .call = 1, .task = 1}),
      "acquire_grads(1)");
}

TEST(PostForward, NoKernelReadsASlice) {
  auto units = sliced_blocks(2);
  units[1].backward_reads = {0, kSlice};
  try {
    Scheduler s(units, {});
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.message(), HasSubstr("unit 0: plane 1 contains slices"));
  }
}

}  // namespace
}  // namespace flatshard
