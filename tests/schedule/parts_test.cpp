// Planes that are all-gathered in parts.
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

TEST(Parts, GoldenStepWithoutRecomputeHasNone) {
  EXPECT_EQ(
      to_string(second_step(fp8_units(3, Columns::stored))),
      "gather(1) gather(2) await(1) release(1) "
      "gather(3) await(2) release(2) "
      "await(3) release(3) "
      "gather'(3.1) "
      "gather'(2.1) acquire_grads(3) await(3.1) release(3.1) "
      "gather'(1.1) reduce(3) acquire_grads(2) await(2.1) release(2.1) "
      "reduce(2) drain(3) acquire_grads(1) await(1.1) release(1.1) "
      "reduce(1) drain(2) drain(1) join");
}

TEST(Parts, GoldenStepGathersTheRowsOfTheRecomputedPartBesideTheColumns) {
  EXPECT_EQ(
      to_string(second_step(fp8_units(3, Columns::stored), {1})),
      "gather(1) gather(2) await(1) release(1) "
      "gather(3) await(2) release(2) "
      "await(3) release(3) "
      "gather'(3.1) gather'(3:1) "
      "gather'(2.1) gather'(2:1) acquire_grads(3) await(3:1) await(3.1) "
      "release(3.1) release(3:1) "
      "gather'(1.1) gather'(1:1) reduce(3) acquire_grads(2) await(2:1) "
      "await(2.1) release(2.1) release(2:1) "
      "reduce(2) drain(3) acquire_grads(1) await(1:1) await(1.1) "
      "release(1.1) release(1:1) "
      "reduce(1) drain(2) drain(1) join");
}

// docs/guides/fp8.md: the all-gathers of a step of `n` units, exactly.
TEST(Parts, F4_AStepGathersWhatTheTableSays) {
  constexpr int n = 4;
  const std::vector<PartId> all{0, 1, 2};
  const auto backward = [&](Columns columns,
                            GatherParts parts,
                            const std::vector<PartId>& recomputed) {
    const auto units = fp8_units(n, columns, parts);
    const auto actions = second_step(units, recomputed);
    // A forward all-gathers the rows once and no column.
    EXPECT_EQ(of_phase(units, actions, Phase::forward), n * kAllRows);
    for (const Action& a : actions) {
      if (a.kind == ActionKind::gather && a.phase == Phase::forward) {
        EXPECT_EQ(a.plane, kRow);
      }
    }
    return of_phase(units, actions, Phase::backward);
  };
  for (const GatherParts parts :
       {GatherParts::unit, GatherParts::recomputed, GatherParts::module}) {
    // Derived: only rows are all-gathered, with a recompute and without.
    for (const auto& recomputed : {std::vector<PartId>{}, {1}, all}) {
      EXPECT_EQ(
          backward(Columns::derived, parts, recomputed),
          (n - 1) * kAllRows);
    }
    // Stored, no recompute: only columns.
    EXPECT_EQ(backward(Columns::stored, parts, {}), n * kAllColumns);
    // Stored, all recomputed: both. The last unit's rows stay.
    EXPECT_EQ(
        backward(Columns::stored, parts, all),
        n * kAllColumns + (n - 1) * kAllRows);
  }
  // Stored, a part recomputed: that part's rows and no more, unless the option
  // is off.
  const auto some = [&](GatherParts parts, const std::vector<PartId>& read) {
    return backward(Columns::stored, parts, read) - n * kAllColumns;
  };
  EXPECT_EQ(some(GatherParts::unit, {1}), (n - 1) * kAllRows);
  EXPECT_EQ(some(GatherParts::recomputed, {1}), n * kRowParts[1]);
  EXPECT_EQ(
      some(GatherParts::recomputed, {0, 2}),
      n * (kRowParts[0] + kRowParts[2]));
  EXPECT_EQ(some(GatherParts::module, {1}), (n - 1) * kRowParts[1]);
}

TEST(Parts, TheFirstStepGathersOnRequestAndTheNextOnesAhead) {
  const auto units = fp8_units(3, Columns::stored);
  Scheduler s(units, {.prefetch = 1});
  const auto first = replay(s, fp8_step(units, {1, 2}));
  EXPECT_THAT(
      to_string(first),
      HasSubstr("gather'(2.1) acquire_grads(3) gather'(3:1) await(3:1) "
                "gather'(3:2) await(3:2) await(3.1)"));
  // Off again automatically.
  const auto last_but_one = replay(s, fp8_step(units));
  const auto last = replay(s, fp8_step(units));
  EXPECT_THAT(to_string(last_but_one), HasSubstr("gather'(2:1)"));
  EXPECT_EQ(of_phase(units, last, Phase::backward), 3 * kAllColumns);
}

TEST(Parts, F3_WithoutPartsTheFirstRecomputeGathersWholePlanes) {
  const auto units = fp8_units(3, Columns::stored, GatherParts::unit);
  Scheduler s(units, {.prefetch = 1});
  EXPECT_EQ(
      of_phase(units, replay(s, fp8_step(units, {1})), Phase::backward),
      3 * (kAllColumns + kAllRows));
}

TEST(Parts, ModuleGathersAndAwaitsEachPart) {
  const auto actions =
      second_step(fp8_units(2, Columns::derived, GatherParts::module), {}, 0);
  EXPECT_EQ(
      to_string(actions),
      "gather(1:0) gather(1:1) gather(1:2) await(1:0) await(1:1) await(1:2) "
      "release(1:0) release(1:1) release(1:2) "
      "gather(2:0) gather(2:1) gather(2:2) await(2:0) await(2:1) await(2:2) "
      "derive(2.1:0) derive(2.1:1) derive(2.1:2) "
      "release(2:0) release(2:1) release(2:2) "
      "acquire_grads(2) await(2.1:2) await(2.1:1) await(2.1:0) "
      "release(2.1:0) release(2.1:1) release(2.1:2) "
      "gather'(1:0) derive'(1.1:0) release(1:0) "
      "gather'(1:1) derive'(1.1:1) release(1:1) "
      "gather'(1:2) derive'(1.1:2) release(1:2) "
      "reduce(2) acquire_grads(1) await(1.1:2) await(1.1:1) await(1.1:0) "
      "release(1.1:0) release(1.1:1) release(1.1:2) "
      "reduce(1) drain(2) drain(1) join");
}

TEST(Parts, ARecomputeOfTheWholeUnitGathersItsPartsAheadFromTheSecondStepOn) {
  const auto units = fp8_units(4, Columns::stored);
  Scheduler s(units, {.prefetch = 0});
  const auto backward = [&] {
    std::string text;
    s.on({.kind = task_begin, .task = 1, .expected = {{3, 1}}});
    for (const ScheduleEvent& event : std::vector<ScheduleEvent>{
             {.kind = recompute_begin, .unit = 3, .task = 1},
             {.kind = read, .unit = 3, .plane = kRow, .part = 0},
             {.kind = recompute_end, .unit = 3, .task = 1},
             {.kind = backward_begin, .unit = 3, .task = 1},
             {.kind = read, .unit = 3, .plane = kColumn, .part = 0},
             {.kind = wgrad_done, .unit = 3, .task = 1}}) {
      text += to_string(s.on(event)) + "; ";
    }
    s.on({.kind = task_end, .task = 1, .outermost = true});
    EXPECT_TRUE(s.resting());
    return text;
  };
  EXPECT_EQ(
      backward(),
      "; gather'(3:0) await(3:0); release(3:0); "
      "gather'(3.1) acquire_grads(3); await(3.1); release(3.1); ");
  EXPECT_EQ(
      backward(),
      "gather'(3:0); await(3:0); release(3:0); "
      "gather'(3.1) acquire_grads(3); await(3.1); release(3.1); ");
}

TEST(Parts, EachHasASlotOfItsOwn) {
  const auto units = fp8_units(3, Columns::stored);
  const auto actions = second_step(units, {0, 2});
  const auto lifetimes = slot_lifetimes(units, actions);
  const SlotPlan plan = SlotPlan::build(lifetimes);
  std::map<PartId, int> uses;
  for (const SlotLifetime& life : lifetimes) {
    if (life.key.role == SlotRole::backward_weights && life.key.plane == kRow) {
      ++uses[life.key.part];
      EXPECT_EQ(life.nbytes, kRowParts[life.key.part]);
      EXPECT_EQ(actions[life.end].part, life.key.part);
    }
  }
  EXPECT_EQ(uses, (std::map<PartId, int>{{0, 3}, {2, 3}}));
  EXPECT_EQ(plan.arena_nbytes(), plan.peak_nbytes());
}

TEST(Parts, ResetRestsAll) {
  for (const Columns columns : {Columns::derived, Columns::stored}) {
    const auto units = fp8_units(3, columns, GatherParts::module);
    const auto step = fp8_step(units, {1});
    for (std::size_t stop = 1; stop < step.size(); ++stop) {
      Scheduler s(units, {.prefetch = 2});
      replay(s, {step.begin(), step.begin() + stop});
      s.on({.kind = reset});
      EXPECT_TRUE(s.resting()) << "after " << stop << " events";
      EXPECT_EQ(s.num_gathered(), 0);
    }
  }
}

// For any recompute, nothing is all-gathered twice, read before it arrived or
// freed unread, and everything is freed.
TEST(Parts, EachIsThereWhenItIsRead) {
  for (const Columns columns : {Columns::derived, Columns::stored}) {
    for (const auto parts :
         {GatherParts::unit, GatherParts::recomputed, GatherParts::module}) {
      for (unsigned bits = 0; bits < 8; ++bits) {
        std::vector<PartId> recomputed;
        for (PartId part = 0; part < kNumParts; ++part) {
          if ((bits >> part & 1U) != 0) {
            recomputed.push_back(part);
          }
        }
        const auto units = fp8_units(4, columns, parts);
        Scheduler s(units, {.prefetch = 1});
        for (int step = 0; step < 3; ++step) {
          std::map<std::pair<UnitId, PlaneId>, bool> there;  // and awaited
          for (const ScheduleEvent& event : fp8_step(units, recomputed)) {
            for (const Action& a : s.on(event)) {
              if (a.unit == kNoUnit) {
                continue;
              }
              const UnitSpec& spec = units[a.unit];
              const std::pair key{a.unit, spec.slice(a.plane, a.part)};
              switch (a.kind) {
                case ActionKind::derive:
                  EXPECT_TRUE(
                      there.contains({a.unit, spec.source(key.second)}));
                  [[fallthrough]];
                case ActionKind::gather:
                  EXPECT_TRUE(there.emplace(key, false).second);
                  break;
                case ActionKind::await:
                  ASSERT_TRUE(there.contains(key));
                  there[key] = true;
                  break;
                case ActionKind::release:
                  EXPECT_EQ(there.erase(key), 1);
                  break;
                default:
                  break;
              }
            }
            if (event.kind == read) {
              const UnitSpec& spec = units[event.unit];
              const auto is_there = [&](PartId part) {
                const auto found =
                    there.find({event.unit, spec.slice(event.plane, part)});
                return found != there.end() && found->second;
              };
              EXPECT_TRUE(is_there(kWhole) || is_there(event.part));
            }
          }
          EXPECT_TRUE(there.empty());
        }
      }
    }
  }
}

TEST(UnitSpec, NumbersPlanesAndPartsInOneRow) {
  const UnitSpec spec = fp8_units(1, Columns::derived)[1];
  EXPECT_EQ(spec.num_slices(), 2 + 3 + 3);
  for (PlaneId slice = 0; slice < spec.num_slices(); ++slice) {
    const auto [plane, part] = spec.plane_part(slice);
    EXPECT_EQ(spec.slice(plane, part), slice);
    EXPECT_EQ(part == kWhole, slice < 2);
  }
  EXPECT_EQ(spec.parts(kColumn), (PlaneSet{5, 6, 7}));
  EXPECT_EQ(spec.source(6), 3);
  EXPECT_EQ(spec.source(kColumn), kRow);
  EXPECT_EQ(spec.source(kRow), kStored);
  EXPECT_EQ(spec.nbytes(kColumn, 1), 512);
}

}  // namespace
}  // namespace flatshard::testing
