// Planes that are derived from others after the all-gather.
#include "flatshard/core/error.h"
#include "flatshard/schedule/keep_units.h"
#include "flatshard/schedule/slot_plan.h"
#include "tests/schedule/fp8_units.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace flatshard::testing {
namespace {

using enum EventKind;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(DerivedPlanes, GoldenStepStagesTheRowsForTheColumns) {
  EXPECT_EQ(
      to_string(second_step(fp8_units(3, Columns::derived))),
      "gather(1) gather(2) await(1) release(1) "
      "gather(3) await(2) release(2) "
      // The unit that runs last derives its columns from the rows that are
      // still unsharded.
      "await(3) derive(3.1) release(3) "
      "gather'(2) derive'(2.1) release(2) acquire_grads(3) await(3.1) "
      "release(3.1) "
      "gather'(1) derive'(1.1) release(1) reduce(3) acquire_grads(2) "
      "await(2.1) release(2.1) "
      "reduce(2) drain(3) acquire_grads(1) await(1.1) release(1.1) "
      "reduce(1) drain(2) drain(1) join");
}

TEST(DerivedPlanes, OneGatherOfTheRowsServesRecomputeAndColumns) {
  const auto units = fp8_units(3, Columns::derived);
  for (const auto& parts : {std::vector<PartId>{1}, std::vector{0, 1, 2}}) {
    const auto actions = second_step(units, parts);
    const std::string text = to_string(actions);
    EXPECT_THAT(
        text,
        HasSubstr("gather'(1) derive'(1.1) reduce(3) acquire_grads(2) await(2) "
                  "await(2.1) release(2) release(2.1)"));
    EXPECT_EQ(of_phase(units, actions, Phase::forward), 3 * kAllRows);
    // The last unit's stay.
    EXPECT_EQ(of_phase(units, actions, Phase::backward), 2 * kAllRows);
  }
}

TEST(DerivedPlanes, PlanesOfTheBackwardMayStayUntilTheWeightsChange) {
  for (const Columns columns : {Columns::derived, Columns::stored}) {
    for (const bool resident : {false, true}) {
      auto units = fp8_units(3, columns);
      for (UnitSpec& unit : units) {
        unit.resident = resident;
        unit.transient =
            columns == Columns::derived ? PlaneSet{kColumn} : PlaneSet();
        unit.policy.keep_backward_planes = true;
      }
      Scheduler s(units, {});
      const auto step = [&] { return replay(s, fp8_step(units)); };
      const std::int64_t rows = 3 * kAllRows;
      for (int change = 0; change < 2; ++change) {
        const auto first = step();
        EXPECT_EQ(of_phase(units, first, Phase::forward), rows);
        EXPECT_TRUE(s.resting());
        EXPECT_EQ(s.num_gathered(), 3);
        // The next microbatch only all-gathers rows for its forward.
        const auto second = step();
        EXPECT_EQ(
            gathered_nbytes(units, second),
            resident ? std::int64_t{0} : rows);
        EXPECT_EQ(of_phase(units, second, Phase::backward), 0);
        EXPECT_THAT(to_string(second), Not(HasSubstr("derive")));
        EXPECT_TRUE(s.resting());
        s.on({.kind = EventKind::weights_changed});
        EXPECT_EQ(s.num_gathered(), 0);
      }
      step();
      s.on({.kind = EventKind::reset});
      EXPECT_TRUE(resident || s.num_gathered() == 0);
    }
  }
}

TEST(DerivedPlanes, KeptAndResidentUnitsDeriveOncePerChange) {
  auto units = fp8_units(3, Columns::derived);
  units[1].policy.reshard_after_forward = false;
  auto actions = second_step(units);
  EXPECT_THAT(to_string(actions), HasSubstr("await(1) derive(1.1) release(1)"));
  EXPECT_EQ(of_phase(units, actions, Phase::backward), kAllRows);

  for (UnitSpec& unit : units) {
    unit.resident = true;
    unit.policy = {};
  }
  Scheduler s(units, {.prefetch = 1});
  for (int change = 0; change < 2; ++change) {
    s.on({.kind = weights_changed});
    for (const int num : {3, 0}) {
      actions = replay(s, fp8_step(units));
      for (const ActionKind kind : {ActionKind::gather, ActionKind::derive}) {
        EXPECT_EQ(std::ranges::count(actions, kind, &Action::kind), num);
      }
      EXPECT_EQ(
          std::ranges::count(actions, ActionKind::release, &Action::kind),
          0);
    }
  }
}

// One plane is stored, and the other is made for each backward.
TEST(DerivedPlanes, ResidentUnitsReleaseWhatIsTransient) {
  auto units = fp8_units(4, Columns::derived);
  for (UnitSpec& unit : units) {
    unit.resident = true;
    unit.transient = {kColumn};
  }
  for (const auto& [prefetch, change] :
       {std::pair{1, 0}, std::pair{1, 1}, std::pair{0, 0}}) {
    Scheduler s(units, {.prefetch = prefetch});
    if (change == 1) {
      replay(s, fp8_step(units));
      s.on({.kind = weights_changed});
    }
    for (const int num_gathers : {4, 0}) {
      const auto actions = replay(s, fp8_step(units));
      const auto count = [&](ActionKind kind) {
        return std::ranges::count(actions, kind, &Action::kind);
      };
      EXPECT_EQ(count(ActionKind::gather), num_gathers);
      EXPECT_EQ(count(ActionKind::derive), 4);
      EXPECT_EQ(count(ActionKind::release), 4);
      for (const Action& a : actions) {
        EXPECT_TRUE(a.kind != ActionKind::release || a.plane == kColumn);
      }
      EXPECT_TRUE(s.resting());
      // Only this unit's columns: no all-gather is worth prefetching.
      EXPECT_EQ(
          SlotPlan::build(slot_lifetimes(units, actions)).arena_nbytes(),
          kAllColumns + 2 * kGrads);
    }
  }
}

TEST(DerivedPlanes, StagingIsSharedByAllUnits) {
  const auto arena = [](int n) {
    const auto units = fp8_units(n, Columns::derived);
    const auto actions = second_step(units);
    return SlotPlan::build(slot_lifetimes(units, actions)).arena_nbytes();
  };
  EXPECT_EQ(arena(6), arena(12));
  EXPECT_EQ(arena(6), kAllRows + 2 * kAllColumns + 2 * kGrads);
}

TEST(DerivedPlanes, AKeptUnitSavesTheGatherOfItsStaging) {
  EXPECT_THAT(
      choose_kept_units(
          fp8_units(4, Columns::derived),
          {.prefetch = 1},
          1 << 20),
      ElementsAre(3, 2, 1));
}

TEST(DerivedPlanes, ASourceIsALowerPlaneThatIsGathered) {
  for (const PlaneId source : {kColumn, 5}) {
    auto units = fp8_units(1, Columns::stored);
    units[1].derived_from = {kStored, source};
    EXPECT_THROW(Scheduler(units, {}), Error);
  }
  auto units = fp8_units(1, Columns::derived);
  units[1].part_nbytes[kColumn].pop_back();
  EXPECT_THROW(Scheduler(units, {}), Error);
}

}  // namespace
}  // namespace flatshard::testing
