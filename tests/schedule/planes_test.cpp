// Units with two planes: rows for the forward, and columns. The backward reads
// one of them or both.
#include "flatshard/core/error.h"
#include "flatshard/schedule/keep_units.h"
#include "flatshard/schedule/scheduler.h"
#include "flatshard/schedule/simulate.h"
#include "flatshard/schedule/slot_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {
namespace {

using enum EventKind;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr PlaneId kRows = 0;
constexpr PlaneId kColumns = 1;
constexpr PlaneSet kBoth{kRows, kColumns};
constexpr std::int64_t kRowsNbytes = 1024;
constexpr std::int64_t kColumnsNbytes = 2048;
constexpr std::int64_t kGradNbytes = 4096;

// Returns a root without parameters around `n` units.
std::vector<UnitSpec> two_planes(int n, PlaneSet backward_reads) {
  std::vector<UnitSpec> units{{.name = "root"}};
  for (int i = 0; i < n; ++i) {
    units.push_back(
        {.name = "b" + std::to_string(i),
         .parent = 0,
         .weights_nbytes = {kRowsNbytes, kColumnsNbytes},
         .grad_nbytes = kGradNbytes,
         .forward_reads = {kRows},
         .backward_reads = backward_reads});
  }
  return units;
}

std::string step_of(const std::vector<UnitSpec>& units, int prefetch = 1) {
  return to_string(simulate_step(units, {.prefetch = prefetch}));
}

std::vector<ScheduleEvent> step_events(const std::vector<UnitSpec>& units) {
  std::vector<int> num_grads(units.size(), 1);
  num_grads[0] = 0;
  return plain_step_events(units, num_grads);
}

// -- all-gathers of planes
// ---------------------------------------------------------

TEST(Planes, GoldenStepWhoseBackwardReadsTheOtherPlane) {
  EXPECT_EQ(
      step_of(two_planes(3, {kColumns})),
      // forward: rows. The last unit's are read no more either.
      "gather(1) gather(2) await(1) release(1) "
      "gather(3) await(2) release(2) "
      "await(3) release(3) "
      // backward: the backward of the root prefetches the last unit's columns.
      "gather'(3.1) "
      "gather'(2.1) await(3.1) acquire_grads(3) release(3.1) "
      "gather'(1.1) await(2.1) reduce(3) acquire_grads(2) release(2.1) "
      "await(1.1) reduce(2) drain(3) acquire_grads(1) release(1.1) "
      "reduce(1) drain(2) drain(1) join");
}

TEST(Planes, GoldenStepWhoseBackwardReadsBoth) {
  EXPECT_EQ(
      step_of(two_planes(3, kBoth)),
      // forward: the last unit's rows stay.
      "gather(1) gather(2) await(1) release(1) "
      "gather(3) await(2) release(2) "
      "await(3) "
      // backward: only its columns are missing.
      "gather'(3.1) "
      "gather'(2) gather'(2.1) await(3.1) acquire_grads(3) "
      "release(3) release(3.1) "
      "gather'(1) gather'(1.1) await(2) await(2.1) reduce(3) "
      "acquire_grads(2) release(2) release(2.1) "
      "await(1) await(1.1) reduce(2) drain(3) acquire_grads(1) "
      "release(1) release(1.1) "
      "reduce(1) drain(2) drain(1) join");
}

TEST(Planes, PlanesWithTheSameReadersGoTogether) {
  const auto one = [](std::vector<UnitSpec> units) {
    for (UnitSpec& unit : units) {
      unit.weights_nbytes.resize(unit.parent == kNoUnit ? 0 : 1);
      unit.forward_reads = unit.backward_reads = PlaneSet::all();
    }
    return units;
  };
  auto units = two_planes(4, kBoth);
  for (UnitSpec& unit : units) {
    unit.forward_reads = unit.backward_reads = PlaneSet::all();
  }
  for (const int prefetch : {0, 1, 2, 3}) {
    const auto both = simulate_step(units, {.prefetch = prefetch});
    const std::string golden = step_of(one(units), prefetch);
    for (const PlaneId plane : {kRows, kColumns}) {
      std::vector<Action> of_plane;
      for (Action action : both) {
        const bool of_weights = action.kind == ActionKind::gather ||
                                action.kind == ActionKind::await ||
                                action.kind == ActionKind::release;
        if (!of_weights || action.plane == plane) {
          action.plane = 0;
          of_plane.push_back(action);
        }
      }
      EXPECT_EQ(to_string(of_plane), golden);
    }
  }
}

TEST(Planes, APlaneWithoutBytesIsNeverGathered) {
  auto units = two_planes(3, kBoth);
  auto with_one = units;
  for (int u = 1; u <= 3; ++u) {
    units[u].weights_nbytes = {kRowsNbytes, 0};
    with_one[u].weights_nbytes = {kRowsNbytes};
    with_one[u].forward_reads = with_one[u].backward_reads = PlaneSet::all();
  }
  EXPECT_EQ(step_of(units), step_of(with_one));
}

// Follows a step event by event: what is awaited, and that nothing is
// all-gathered twice or freed while in use.
TEST(Planes, EachPhaseHasWhatItReadsForAsLongAsItRuns) {
  for (const PlaneSet reads : {PlaneSet{kRows}, PlaneSet{kColumns}, kBoth}) {
    const auto units = two_planes(5, reads);
    for (const int prefetch : {0, 1, 2, 4}) {
      Scheduler s(units, {.prefetch = prefetch});
      for (int step = 0; step < 2; ++step) {
        std::vector<std::vector<bool>> there(6, {false, false});
        std::vector<std::vector<bool>> awaited(6, {false, false});
        std::vector<PlaneSet> in_use(6);
        for (const ScheduleEvent& event : step_events(units)) {
          const UnitId u = event.unit;
          if (event.kind == forward_end || event.kind == inputs_done) {
            in_use[u] = {};
          }
          for (const Action& a : s.on(event)) {
            if (a.kind == ActionKind::gather) {
              EXPECT_FALSE(there[a.unit][a.plane]);
              EXPECT_TRUE(units[a.unit].reads(a.phase).contains(a.plane));
              there[a.unit][a.plane] = true;
            } else if (a.kind == ActionKind::await) {
              EXPECT_TRUE(there[a.unit][a.plane]);
              awaited[a.unit][a.plane] = true;
            } else if (a.kind == ActionKind::release) {
              EXPECT_TRUE(there[a.unit][a.plane]);
              EXPECT_FALSE(in_use[a.unit].contains(a.plane));
              there[a.unit][a.plane] = awaited[a.unit][a.plane] = false;
            }
          }
          if (event.kind == forward_begin || event.kind == backward_begin) {
            in_use[u] = units[u].reads(
                event.kind == forward_begin ? Phase::forward : Phase::backward);
            in_use[u].for_each(
                [&](PlaneId plane) { EXPECT_TRUE(awaited[u][plane]); });
          }
          for (UnitId v = 1; v <= 5; ++v) {
            for (const PlaneId plane : {kRows, kColumns}) {
              EXPECT_EQ(s.gathered_planes(v).contains(plane), there[v][plane]);
            }
          }
        }
        EXPECT_TRUE(s.resting());
        EXPECT_EQ(s.num_gathered(), 0);
      }
    }
  }
}

// -- what stays ---------------------------------------------------------------

TEST(Planes, AKeptUnitKeepsWhatItsBackwardReads) {
  const auto kept = [](PlaneSet backward_reads) {
    auto units = two_planes(3, backward_reads);
    units[1].policy.reshard_after_forward = false;
    return step_of(units);
  };
  EXPECT_THAT(kept({kColumns}), HasSubstr("await(1) release(1) gather(3)"));
  EXPECT_THAT(kept({kColumns}), HasSubstr("gather'(1.1)"));
  EXPECT_THAT(kept(kBoth), HasSubstr("await(1) gather(3)"));
  EXPECT_THAT(
      kept(kBoth),
      HasSubstr("reduce(2) drain(3) acquire_grads(1) "
                "release(1) release(1.1)"));
  EXPECT_THAT(kept(kBoth), Not(HasSubstr("gather'(1) ")));
}

TEST(Planes, AUnitThatIsNeverReshardedKeepsBoth) {
  const auto units = two_planes(3, {kColumns});
  Scheduler s(units, {.prefetch = 1});
  s.set_policy(
      2,
      {.reshard_after_forward = false, .reshard_after_backward = false});
  replay(s, step_events(units));
  EXPECT_TRUE(s.resting());
  EXPECT_EQ(s.gathered_planes(2), kBoth);
  for (const Action& a : replay(s, step_events(units))) {
    EXPECT_FALSE(a.kind == ActionKind::gather && a.unit == 2);
  }
  EXPECT_EQ(
      to_string(s.on({.kind = weights_changed})),
      "release(2) release(2.1)");
}

TEST(Planes, ResidentPlanesAreGatheredOncePerChange) {
  auto units = two_planes(3, {kColumns});
  for (UnitSpec& unit : units) {
    unit.resident = true;
  }
  Scheduler s(units, {.prefetch = 1});
  for (int change = 0; change < 2; ++change) {
    s.on({.kind = weights_changed});
    for (const int num_gathers : {6, 0}) {
      const auto actions = replay(s, step_events(units));
      EXPECT_EQ(
          std::ranges::count(actions, ActionKind::gather, &Action::kind),
          num_gathers);
      EXPECT_EQ(
          std::ranges::count(actions, ActionKind::release, &Action::kind),
          0);
    }
  }
}

TEST(Planes, OnlyUnitsWithAPlaneThatIsGatheredTwiceAreWorthKeeping) {
  constexpr std::int64_t kPlenty = 1 << 20;
  EXPECT_THAT(
      choose_kept_units(two_planes(4, {kColumns}), {.prefetch = 1}, kPlenty),
      IsEmpty());
  EXPECT_THAT(
      choose_kept_units(two_planes(4, kBoth), {.prefetch = 1}, kPlenty),
      ElementsAre(3, 2, 1));
}

// -- recompute, prefetch in vain, unshard -------------------------------------

TEST(Planes, B48_ARecomputeGathersWhatItReadsBesideTheBackwardsPlane) {
  for (const bool stops_early : {false, true}) {
    Scheduler s(two_planes(4, {kColumns}), {.prefetch = 0});
    s.on({.kind = task_begin, .task = 1, .expected = {{3, 1}}});
    EXPECT_EQ(
        to_string(s.on({.kind = recompute_begin, .unit = 3, .task = 1})),
        "gather'(3) await(3)");
    if (!stops_early) {
      EXPECT_EQ(
          to_string(s.on({.kind = recompute_end, .unit = 3, .task = 1})),
          "release(3)");
    }
    EXPECT_EQ(
        to_string(s.on({.kind = backward_begin, .unit = 3, .task = 1})),
        std::string("gather'(3.1) await(3.1) ") +
            (stops_early ? "release(3) " : "") + "acquire_grads(3)");
    EXPECT_EQ(
        to_string(s.on({.kind = wgrad_done, .unit = 3, .task = 1})),
        "release(3.1)");
  }
}

TEST(Planes, RowsThatBothReadAreGatheredOnceForRecomputeAndBackward) {
  Scheduler s(two_planes(4, kBoth), {.prefetch = 0});
  s.on({.kind = task_begin, .task = 1, .expected = {{3, 1}}});
  s.on({.kind = recompute_begin, .unit = 3, .task = 1});
  EXPECT_EQ(to_string(s.on({.kind = recompute_end, .unit = 3, .task = 1})), "");
  EXPECT_EQ(
      to_string(s.on({.kind = backward_begin, .unit = 3, .task = 1})),
      "gather'(3.1) await(3.1) acquire_grads(3)");
}

TEST(Planes, PlanesThatWereGatheredAheadInVainAreReleased) {
  auto units = two_planes(4, {kColumns});
  for (const bool reshards : {true, false}) {
    Scheduler s(units, {.prefetch = 1});
    for (UnitId u = 1; u <= 4; ++u) {
      s.set_policy(u, {.reshard_after_backward = reshards});
    }
    s.on({.kind = unshard, .unit = 3});  // rows, which stay
    s.on({.kind = task_begin, .task = 1, .expected = {{4, 1}}});
    EXPECT_EQ(
        to_string(s.on({.kind = backward_begin, .unit = 4, .task = 1})),
        "gather'(4.1) gather'(3.1) await(4.1) acquire_grads(4)");
    s.on({.kind = wgrad_done, .unit = 4, .task = 1});
    EXPECT_THAT(
        to_string(s.on({.kind = task_end, .task = 1, .outermost = true})),
        HasSubstr(
            reshards ? "release(3) release(3.1) reduce"
                     : "release(3.1) reduce"));
    EXPECT_EQ(s.gathered_planes(3), reshards ? PlaneSet() : PlaneSet{kRows});
    EXPECT_TRUE(s.resting());
  }
}

TEST(Planes, AnUnshardGathersWhatTheForwardReads) {
  Scheduler s(two_planes(4, kBoth), {.prefetch = 1});
  EXPECT_EQ(
      to_string(s.on({.kind = unshard, .unit = 2})),
      "gather(2) await(2)");
  EXPECT_TRUE(s.resting());
  EXPECT_EQ(to_string(s.on({.kind = reshard, .unit = 2})), "release(2)");
}

TEST(Planes, ABackwardWithoutWeightsGathersNone) {
  auto units = two_planes(3, {kColumns});
  units[2].policy.unshard_in_backward = false;
  EXPECT_THAT(step_of(units), Not(HasSubstr("(2.1)")));
}

TEST(Planes, ResetRestsEveryPlane) {
  const auto units = two_planes(4, kBoth);
  const auto step = step_events(units);
  for (std::size_t stop = 1; stop < step.size(); ++stop) {
    Scheduler s(units, {.prefetch = 2});
    replay(s, {step.begin(), step.begin() + stop});
    s.on({.kind = reset});
    EXPECT_TRUE(s.resting()) << "after " << stop << " events";
    EXPECT_EQ(s.num_gathered(), 0);
  }
}

// -- slots --------------------------------------------------------------------

struct Uses {
  std::vector<SlotLifetime> lifetimes;
  SlotPlan plan;
};

Uses uses_of(const std::vector<UnitSpec>& units, int prefetch) {
  const auto actions = simulate_step(units, {.prefetch = prefetch});
  auto lifetimes = slot_lifetimes(units, actions);
  SlotPlan plan = SlotPlan::build(lifetimes);
  return {std::move(lifetimes), std::move(plan)};
}

TEST(Planes, B19_EachPlaneHasASlotOfItsOwnSize) {
  const Uses uses = uses_of(two_planes(3, kBoth), 1);
  EXPECT_EQ(uses.plan.num_keys(), 3 + 5 + 3);  // unit 3's rows are kept
  for (const SlotLifetime& life : uses.lifetimes) {
    EXPECT_EQ(
        life.nbytes,
        life.key.role == SlotRole::gradients ? kGradNbytes
        : life.key.plane == kRows            ? kRowsNbytes
                                             : kColumnsNbytes);
    EXPECT_LT(life.begin, life.end);
  }
  const auto offset = [&](UnitId unit, PlaneId plane, SlotRole role) {
    return uses.plan.offset({.unit = unit, .plane = plane, .role = role});
  };
  using enum SlotRole;
  for (const UnitId u : {1, 2}) {
    EXPECT_GE(offset(u, kRows, forward_weights), 0);
    EXPECT_EQ(offset(u, kColumns, forward_weights), -1);
    // Both are in the backward, so they do not overlap.
    const std::int64_t rows = offset(u, kRows, backward_weights);
    const std::int64_t columns = offset(u, kColumns, backward_weights);
    ASSERT_GE(rows, 0);
    ASSERT_GE(columns, 0);
    EXPECT_TRUE(
        rows + kRowsNbytes <= columns || columns + kColumnsNbytes <= rows);
  }
}

TEST(Planes, APlanesSlotLivesFromItsGatherToItsRelease) {
  const auto units = two_planes(3, {kColumns});
  const auto actions = simulate_step(units, {.prefetch = 1});
  for (const SlotLifetime& life : slot_lifetimes(units, actions)) {
    if (life.key.role == SlotRole::gradients) {
      continue;
    }
    const Action& first = actions[life.begin];
    EXPECT_EQ(first.kind, ActionKind::gather);
    const Action& last = actions[life.end];
    EXPECT_EQ(last.kind, ActionKind::release);
    for (const Action& a : {first, last}) {
      EXPECT_EQ(a.unit, life.key.unit);
      EXPECT_EQ(a.plane, life.key.plane);
    }
  }
}

TEST(Planes, TheArenaHoldsWhatLivesAtOnce) {
  for (const int prefetch : {0, 1, 2}) {
    const auto peak = [&](PlaneSet backward_reads) {
      const Uses uses = uses_of(two_planes(8, backward_reads), prefetch);
      EXPECT_EQ(uses.plan.arena_nbytes(), uses.plan.peak_nbytes());
      return uses.plan.peak_nbytes();
    };
    const std::int64_t units = 1 + prefetch;
    const std::int64_t grads = 2 * kGradNbytes;
    EXPECT_EQ(peak({kRows}), units * kRowsNbytes + grads);
    EXPECT_EQ(peak({kColumns}), units * kColumnsNbytes + grads);
    EXPECT_EQ(peak(kBoth), units * (kRowsNbytes + kColumnsNbytes) + grads);
  }
}

// -- specs --------------------------------------------------------------------

TEST(Planes, AUnitReadsPlanesThatItHas) {
  auto units = two_planes(2, kBoth);
  units[2].backward_reads = {2};
  try {
    Scheduler s(units, {});
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.message(), HasSubstr("unit b1 reads plane 2, but has 2"));
  }
  units[2].backward_reads = kBoth;
  units[2].weights_nbytes.resize(PlaneSet::kMaxPlanes + 1);
  EXPECT_THROW(Scheduler(units, {}), Error);
}

TEST(PlaneSet, IsASet) {
  PlaneSet planes{0, 3};
  EXPECT_TRUE(planes.contains(3));
  EXPECT_FALSE(planes.contains(1));
  planes.insert(31);
  EXPECT_EQ(planes & PlaneSet({3, 31}), PlaneSet({31, 3}));
  EXPECT_EQ(planes - PlaneSet({0}), PlaneSet({3, 31}));
  EXPECT_EQ(planes & PlaneSet::all(), planes);
  EXPECT_TRUE((planes - PlaneSet::all()).empty());
  std::vector<PlaneId> each;
  planes.for_each([&](PlaneId plane) { each.push_back(plane); });
  EXPECT_THAT(each, ElementsAre(0, 3, 31));
}

}  // namespace
}  // namespace flatshard
