#include "flatshard/schedule/keep_units.h"

#include "flatshard/schedule/simulate.h"
#include "flatshard/schedule/slot_plan.h"
#include "tests/schedule/blocks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace flatshard {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using testing::kUnit;

constexpr SchedulerOptions kOptions{.prefetch = 1};

std::vector<UnitSpec> full_blocks(int n) {
  return testing::blocks(
      n,
      {.name = "root", .weights_nbytes = {kUnit}, .grad_nbytes = kUnit});
}

void keep(std::vector<UnitSpec>& units, const std::vector<UnitId>& kept) {
  for (const UnitId u : kept) {
    units[u].policy.reshard_after_forward = false;
  }
}

std::int64_t arena(const std::vector<UnitSpec>& units) {
  const auto actions = simulate_step(units, kOptions);
  return SlotPlan::build(slot_lifetimes(units, actions)).arena_nbytes();
}

auto num_gathers(const std::vector<UnitSpec>& units) {
  return std::ranges::count(
      simulate_step(units, kOptions),
      ActionKind::gather,
      &Action::kind);
}

TEST(KeepUnits, TheLastOnesThatFit) {
  auto units = full_blocks(8);
  const std::int64_t least = arena(units);
  const auto before = num_gathers(units);
  // The backward starts with the last block, 8, so it is kept anyway.
  const auto kept = choose_kept_units(units, kOptions, least + 2 * kUnit);
  ASSERT_FALSE(kept.empty());
  EXPECT_EQ(kept.front(), 7);
  EXPECT_TRUE(std::ranges::is_sorted(kept, std::greater()));
  keep(units, kept);
  EXPECT_LE(arena(units), least + 2 * kUnit);
  EXPECT_EQ(num_gathers(units), before - std::ssize(kept));
  // One more would not have fitted.
  units[kept.back() - 1].policy.reshard_after_forward = false;
  EXPECT_GT(arena(units), least + 2 * kUnit);
}

TEST(KeepUnits, AllOfThemInPlenty) {
  auto units = full_blocks(5);
  const auto kept = choose_kept_units(units, kOptions, 100 * kUnit);
  EXPECT_THAT(kept, ElementsAre(4, 3, 2, 1));
  keep(units, kept);
  EXPECT_EQ(num_gathers(units), 6);  // each unit once
}

TEST(KeepUnits, NoneWithoutRoom) {
  const auto units = full_blocks(5);
  EXPECT_THAT(choose_kept_units(units, kOptions, 0), IsEmpty());
  EXPECT_THAT(choose_kept_units(units, kOptions, arena(units) - 1), IsEmpty());
}

TEST(KeepUnits, ASmallOneWhereALargeOneDoesNotFit) {
  auto units = full_blocks(6);
  units[2].weights_nbytes = units[3].weights_nbytes = {50 * kUnit};
  // Room for both at once, as when 3 is prefetched, and for one small unit
  // more.
  const auto kept = choose_kept_units(units, kOptions, arena(units) + kUnit);
  EXPECT_THAT(kept, ElementsAre(5, 4, 3, 1));
}

TEST(KeepUnits, NotThoseThatAreNeverGathered) {
  auto units = full_blocks(5);
  units[3].weights_nbytes = {0};
  EXPECT_THAT(
      choose_kept_units(units, kOptions, 100 * kUnit),
      ElementsAre(4, 2, 1));
}

}  // namespace
}  // namespace flatshard
