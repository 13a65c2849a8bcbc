#include "flatshard/schedule/slot_plan.h"

#include "flatshard/schedule/simulate.h"
#include "tests/schedule/blocks.h"

#include <gtest/gtest.h>

#include <random>

namespace flatshard {
namespace {

using testing::blocks;
using testing::kUnit;

void expect_no_overlap(
    const SlotPlan& plan,
    const std::vector<SlotLifetime>& lifetimes) {
  for (const SlotLifetime& a : lifetimes) {
    ASSERT_GE(plan.offset(a.key), 0);
    ASSERT_EQ(plan.offset(a.key) % SlotPlan::kAlignment, 0);
    ASSERT_LE(plan.offset(a.key) + a.nbytes, plan.arena_nbytes());
    for (const SlotLifetime& b : lifetimes) {
      const bool together = a.begin < b.end && b.begin < a.end;
      if (&a == &b || a.key == b.key || !together) {
        continue;
      }
      const std::int64_t pa = plan.offset(a.key);
      const std::int64_t pb = plan.offset(b.key);
      EXPECT_TRUE(pa + a.nbytes <= pb || pb + b.nbytes <= pa);
    }
  }
}

TEST(SlotPlan, EqualUnitsNeedAsManySlotsAsLiveAtOnce) {
  for (const int prefetch : {0, 1, 3}) {
    const auto units = blocks(12);
    const auto actions = simulate_step(units, {.prefetch = prefetch});
    const auto lifetimes = slot_lifetimes(units, actions);
    const SlotPlan plan = SlotPlan::build(lifetimes);
    expect_no_overlap(plan, lifetimes);
    // 1 + prefetch weight buffers, 2 gradient buffers.
    EXPECT_EQ(plan.peak_nbytes(), (3 + prefetch) * kUnit);
    EXPECT_EQ(plan.arena_nbytes(), plan.peak_nbytes());
  }
}

TEST(SlotPlan, GradientsThatComeAsTensorsNeedTheirSlotLater) {
  // A root that is unsharded all the time, as large as ten blocks.
  auto units = blocks(12);
  units[0].weights_nbytes = {10 * kUnit};
  units[0].grad_nbytes = 10 * kUnit;
  const auto arena = [&](bool grads_in_place) {
    for (UnitSpec& unit : units) {
      unit.grads_in_place = grads_in_place;
    }
    const auto lifetimes = slot_lifetimes(units, simulate_step(units, {}));
    const SlotPlan plan = SlotPlan::build(lifetimes);
    expect_no_overlap(plan, lifetimes);
    return plan.arena_nbytes();
  };
  // The root's gradients are next to its weights and blocks from the start of
  // its backward on, or only when the blocks are through.
  EXPECT_GE(arena(true), 22 * kUnit);
  EXPECT_LE(arena(false), 21 * kUnit);
}

TEST(SlotPlan, RandomLifetimesNeverOverlap) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<SlotLifetime> lifetimes;
    const int count = 1 + static_cast<int>(random() % 40);
    for (int i = 0; i < count; ++i) {
      const std::int64_t begin = random() % 50;
      lifetimes.push_back(
          {{.unit = i, .role = SlotRole::gradients},
           begin,
           begin + 1 + static_cast<std::int64_t>(random() % 20),
           static_cast<std::int64_t>(random() % 5000)});
    }
    const SlotPlan plan = SlotPlan::build(lifetimes);
    expect_no_overlap(plan, lifetimes);
    EXPECT_GE(plan.arena_nbytes(), plan.peak_nbytes());
  }
}

TEST(SlotPlan, UnknownKeyHasNoOffset) {
  EXPECT_EQ(SlotPlan().offset({.unit = 3, .role = SlotRole::gradients}), -1);
}

TEST(SlotPlan, ResidentUnitsTakeNoWeightSlot) {
  auto units = blocks(2);
  for (UnitSpec& unit : units) {
    unit.resident = true;
  }
  for (const SlotLifetime& life :
       slot_lifetimes(units, simulate_step(units, {}))) {
    EXPECT_EQ(life.key.role, SlotRole::gradients);
  }
}

}  // namespace
}  // namespace flatshard
