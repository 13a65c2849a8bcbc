// Steps by an OverlapPlan: what the Scheduler makes of two microbatches that
// are under way at once.
#include "flatshard/core/error.h"
#include "flatshard/schedule/overlap_events.h"
#include "flatshard/schedule/simulate.h"
#include "flatshard/schedule/slot_plan.h"
#include "tests/schedule/blocks.h"
#include "tests/schedule/plan_shapes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using testing::kUnit;
using testing::PlanCase;

constexpr SchedulerOptions kThreeSlots{.prefetch = 1, .max_grad_slots = 3};

PlanUnits units_of(const PlanCase& c) {
  PlanUnits units{.embed_grads = 1, .head_grads = 1};
  for (int l = 0; l < c.layers; ++l) {
    const bool dense = !c.options.dense.empty() && c.options.dense[l];
    units.layers.push_back(l + 1);
    units.layer_grads.push_back(
        {.attend = 3,
         .shared = c.options.shared_experts && !dense ? 2 : 0,
         .experts = dense ? 0 : 2});
  }
  return units;
}

std::vector<UnitSpec> specs_of(const PlanCase& c) {
  return testing::blocks(
      c.layers,
      {.name = "root", .weights_nbytes = {kUnit}, .grad_nbytes = kUnit});
}

// The number of a step's actions.
struct Counts {
  int gathers = 0;
  int on_demand = 0;  ///< gathered when the unit begins
  int most_gathered = 0;
  int most_grads = 0;
  int joins = 0;
  std::map<UnitId, int> reduced;
};

Counts run_step(Scheduler& s, const PlanCase& c, const PlanUnits& units) {
  Counts counts;
  int gathered = 0;
  int grads = 0;
  // A trainer does this after each step of the optimizer.
  s.on({.kind = EventKind::weights_changed});
  s.on({.kind = EventKind::unshard, .unit = 0, .awaits = false});
  for (const ScheduleEvent& event : plan_events(c.plan(), units, c.options)) {
    for (const Action& a : s.on(event)) {
      const bool below = a.unit > 0;
      switch (a.kind) {
        case ActionKind::gather:
          ++counts.gathers;
          gathered += below;
          counts.on_demand += a.unit == event.unit;
          break;
        case ActionKind::release:
          gathered -= below;
          break;
        case ActionKind::acquire_grads:
          grads += below;
          break;
        case ActionKind::reduce:
        case ActionKind::accumulate:
          ++counts.reduced[a.unit];
          break;
        case ActionKind::drain:
          grads -= below;
          break;
        case ActionKind::join:
          ++counts.joins;
          break;
        default:
          break;
      }
      counts.most_gathered = std::max(counts.most_gathered, gathered);
      counts.most_grads = std::max(counts.most_grads, grads);
    }
  }
  EXPECT_EQ(gathered, 0);
  EXPECT_EQ(grads, 0);
  EXPECT_TRUE(s.resting());
  return counts;
}

Counts run_step(Scheduler& s, const PlanCase& c) {
  return run_step(s, c, units_of(c));
}

TEST(Interleaved, EmbeddingAndHeadAreTwoUnitsMoreInTheirOrder) {
  for (const PlanCase& c : testing::plan_cases()) {
    SCOPED_TRACE(c.name());
    PlanUnits units = units_of(c);
    units.ends = PlanUnits::Ends{.embed = c.layers + 1, .head = c.layers + 2};
    Scheduler s(testing::blocks(c.layers + 2), kThreeSlots);
    const bool both = c.options.in_flight > 1 && c.microbatches > 1;
    for (int step = 0; step < 2; ++step) {
      const Counts counts = run_step(s, c, units);
      EXPECT_LE(counts.most_gathered, both ? 4 : 3);
      EXPECT_LE(counts.most_grads, 3);
      EXPECT_EQ(counts.joins, c.options.in_flight > 1 ? 1 : c.microbatches);
      for (UnitId u = 1; u <= c.layers + 2; ++u) {
        EXPECT_EQ(counts.reduced.at(u), c.microbatches) << "unit " << u;
      }
    }
  }
}

TEST(Interleaved, P1_EveryPlanStaysWithinFourUnitsAndGathersAhead) {
  for (const PlanCase& c : testing::plan_cases()) {
    SCOPED_TRACE(c.name());
    Scheduler s(specs_of(c), kThreeSlots);
    const bool both = c.options.in_flight > 1 && c.microbatches > 1;
    for (int step = 0; step < 2; ++step) {
      const Counts counts = run_step(s, c);
      EXPECT_LE(counts.most_gathered, both ? 4 : 2);
      // Between two microbatches of plain accumulation the root has left.
      EXPECT_EQ(
          counts.on_demand,
          c.options.in_flight > 1 ? 0 : c.microbatches - 1);
      EXPECT_LE(counts.most_grads, 3);
      EXPECT_EQ(counts.joins, c.options.in_flight > 1 ? 1 : c.microbatches);
      for (UnitId u = 0; u <= c.layers; ++u) {
        EXPECT_EQ(counts.reduced.at(u), c.microbatches) << "unit " << u;
      }
    }
  }
}

// The inputs of matmuls with delayed weight gradients are kept until then.
TEST(Interleaved, WeightGradientsOfOneLayerAreLateAtOnce) {
  for (const PlanCase& c : testing::plan_cases()) {
    if (!c.options.delay_wgrad) {
      continue;
    }
    SCOPED_TRACE(c.name());
    std::map<int, int> late;  // nodes, by layer
    std::size_t most = 0;
    for (const PlanStep& step : c.plan()) {
      const bool has_weights =
          step.layer >= 0 &&
          (step.node == PlanNode::attend || step.node == PlanNode::shared ||
           step.node == PlanNode::experts);
      if (has_weights && step.pass == PlanPass::backward) {
        ++late[step.layer];
      } else if (step.pass == PlanPass::wgrad && --late.at(step.layer) == 0) {
        late.erase(step.layer);
      }
      most = std::max(most, late.size());
    }
    EXPECT_TRUE(late.empty());
    EXPECT_LE(most, 1U);
  }
}

TEST(Interleaved, AtTheCrossingOneGatherServesBoth) {
  const auto gathers = [](int layers, int microbatches, int in_flight = 2) {
    const PlanCase c{
        layers,
        microbatches,
        {.in_flight = in_flight, .delay_wgrad = true}};
    Scheduler s(specs_of(c), kThreeSlots);
    run_step(s, c);
    return run_step(s, c).gathers;
  };
  // Each layer twice per microbatch, less one for each time that a forward's
  // last layer starts a backward, and two where backward and forward meet.
  EXPECT_EQ(gathers(48, 3), 2 * 48 * 3 - 3 - 2 * 2);
  EXPECT_EQ(gathers(5, 4), 2 * 5 * 4 - 4 - 3);
  EXPECT_EQ(gathers(4, 1), 2 * 4 - 1);
  // A pair of forwards all-gathers each of five layers once for both.
  EXPECT_LE(gathers(5, 5, 3), gathers(5, 5) - 5);
}

TEST(Interleaved, P2_WhatABackwardAwaitsSurvivesTheEndOfAnotherOne) {
  const PlanCase c{2, 2, {.delay_wgrad = true}};
  const auto units = testing::blocks(2);
  Scheduler s(units, kThreeSlots);
  std::string text;
  for (const ScheduleEvent& event :
       plan_events(c.plan(), units_of(c), c.options)) {
    const std::string actions = to_string(s.on(event));
    text += actions.empty() ? "" : actions + "\n";
  }
  EXPECT_EQ(
      text,
      // F0
      "gather(1)\n"
      "gather(2) await(1)\n"
      "release(1)\n"
      "await(2)\n"
      // B0 and F1: unit 2 was kept, and is both at once; unit 1 too
      "gather(1)\n"
      "acquire_grads(2)\n"
      "await(1)\n"
      "reduce(2) acquire_grads(1)\n"
      "release(1)\n"
      "reduce(1)\n"
      // B1: unit 2 survived the end of B0
      "gather'(1) drain(2) acquire_grads(2)\n"
      "release(2)\n"
      "await(1) drain(1) acquire_grads(1)\n"
      "release(1)\n"
      "reduce(2) reduce(1) drain(2) drain(1) join\n");
}

TEST(Interleaved, P4_LateWeightGradientsHoldTheSlotAndNotTheWeights) {
  Scheduler s(testing::blocks(3), kThreeSlots);
  const auto say = [&s](const ScheduleEvent& event) {
    return to_string(s.on(event));
  };
  s.on(
      {.kind = EventKind::task_begin,
       .task = 0,
       .expected = {{3, 3}, {2, 1}},
       .calls = {{3, 1}, {2, 1}, {1, 1}}});
  s.on({.kind = EventKind::backward_begin, .unit = 3, .task = 0});
  EXPECT_EQ(
      say(
          {.kind = EventKind::wgrad_deferred,
           .unit = 3,
           .task = 0,
           .count = 2}),
      "");
  // The one that is not late: it came, so nothing reads weights any more.
  EXPECT_EQ(
      say({.kind = EventKind::wgrad_done, .unit = 3, .task = 0}),
      "release(3)");
  EXPECT_THAT(
      say({.kind = EventKind::backward_begin, .unit = 2, .task = 0}),
      Not(HasSubstr("reduce")));
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(
        say(
            {.kind = EventKind::wgrad_done,
             .unit = 3,
             .task = 0,
             .deferred = true}),
        "");
  }
  EXPECT_THAT(
      say({.kind = EventKind::backward_begin, .unit = 1, .task = 0}),
      HasSubstr("reduce(3)"));
}

TEST(Interleaved, P5_LateWeightGradientsThatNeverComeAreNamed) {
  Scheduler s(testing::blocks(2), kThreeSlots);
  s.on({.kind = EventKind::task_begin, .task = 0, .expected = {{2, 2}}});
  s.on({.kind = EventKind::backward_begin, .unit = 2, .task = 0});
  s.on({.kind = EventKind::wgrad_deferred, .unit = 2, .task = 0, .count = 2});
  s.on({.kind = EventKind::wgrad_done, .unit = 2, .task = 0, .deferred = true});
  try {
    s.on({.kind = EventKind::task_end, .task = 0, .outermost = true});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    EXPECT_THAT(
        error.message(),
        HasSubstr("unit 1: 1 delayed weight gradients"));
  }
}

// Compute would wait for all reductions in the middle of the next forward.
TEST(Interleaved, P3_ComputeWaitsForReductionsInTheLastMicrobatchOnly) {
  const PlanCase c{3, 4, {}};
  Scheduler s(specs_of(c), kThreeSlots);
  int num_tasks = 0;
  for (const ScheduleEvent& event :
       plan_events(c.plan(), units_of(c), c.options)) {
    num_tasks += event.kind == EventKind::task_end;
    const bool joins =
        std::ranges::count(s.on(event), ActionKind::join, &Action::kind) > 0;
    EXPECT_EQ(
        joins,
        event.kind == EventKind::task_end && num_tasks == c.microbatches);
  }
  EXPECT_EQ(num_tasks, c.microbatches);
}

// ZeRO-0 to 2 keep weights. A gradient is reduced once, in the last microbatch.
TEST(Interleaved, ResidentUnitsAreGatheredOnce) {
  for (const bool delay : {false, true}) {
    const PlanCase c{3, 3, {.delay_wgrad = delay}};
    auto units = specs_of(c);
    for (UnitSpec& unit : units) {
      unit.resident = true;
      unit.reduce_every_microbatch = false;
    }
    Scheduler s(units, kThreeSlots);
    const auto actions =
        replay(s, plan_events(c.plan(), units_of(c), c.options));
    const auto count = [&](ActionKind kind) {
      return std::ranges::count(actions, kind, &Action::kind);
    };
    EXPECT_EQ(count(ActionKind::gather), 4);
    EXPECT_EQ(count(ActionKind::release), 0);
    EXPECT_EQ(count(ActionKind::accumulate), 2 * 4);
    EXPECT_EQ(count(ActionKind::reduce), 4);
  }
}

TEST(Interleaved, KeptUnitsStayFromTheirForwardToTheirBackward) {
  const PlanCase c{4, 3, {}};
  auto units = specs_of(c);
  for (UnitSpec& unit : units) {
    unit.policy.reshard_after_forward = false;
  }
  Scheduler s(units, kThreeSlots);
  run_step(s, c);
  const Counts counts = run_step(s, c);
  // All-gathered by the first forward, and kept until the last backward. Only
  // the first layer is resharded between a backward and its next forward.
  EXPECT_LE(counts.gathers, 4 + 2);
  EXPECT_EQ(counts.on_demand, 0);
}

// Slices that are kept from forward to backward, of either microbatch.
TEST(Interleaved, UnitsAreGatheredFromTheirSlices) {
  for (const PlanCase& c : testing::plan_cases()) {
    SCOPED_TRACE(c.name());
    auto units = specs_of(c);
    for (UnitSpec& unit : units) {
      unit.weights_nbytes = {kUnit, kUnit / 2};
      unit.forward_reads = unit.backward_reads = {0};
      unit.post_forward = 1;
    }
    Scheduler s(units, kThreeSlots);
    for (int step = 0; step < 2; ++step) {
      std::map<UnitId, PlaneSet> there;
      s.on({.kind = EventKind::weights_changed});
      for (const ScheduleEvent& event :
           plan_events(c.plan(), units_of(c), c.options)) {
        for (const Action& a : s.on(event)) {
          PlaneSet& planes = there[a.unit];
          if (a.kind == ActionKind::gather || a.kind == ActionKind::derive) {
            EXPECT_FALSE(planes.contains(a.plane));
            // A slice is derived from a full plane.
            EXPECT_EQ(a.plane == 1, a.kind == ActionKind::derive);
            EXPECT_EQ(
                a.kind == ActionKind::derive ? planes.contains(0)
                                             : planes.contains(1),
                a.kind == ActionKind::derive || a.from_post_forward);
            planes.insert(a.plane);
          } else if (a.kind == ActionKind::release) {
            EXPECT_TRUE(planes.contains(a.plane));
            planes = planes - PlaneSet{a.plane};
          } else if (a.kind == ActionKind::await) {
            EXPECT_TRUE(planes.contains(0));
          }
        }
      }
      for (const auto& [unit, planes] : there) {
        EXPECT_TRUE(planes.empty()) << unit;
      }
      EXPECT_TRUE(s.resting());
    }
  }
}

// Planes of FP8: rows for the forward, columns for the backward.
TEST(Interleaved, EachPhaseKeepsTheOthersPlanes) {
  const PlanCase c{4, 3, {.delay_wgrad = true}};
  auto units = specs_of(c);
  for (UnitId u = 1; u <= 4; ++u) {
    units[u].weights_nbytes = {kUnit, kUnit};
    units[u].forward_reads = {0};
    units[u].backward_reads = {1};
  }
  Scheduler s(units, kThreeSlots);
  for (int step = 0; step < 2; ++step) {
    std::map<std::pair<UnitId, PlaneId>, int> alive;
    int peak = 0;
    s.on({.kind = EventKind::weights_changed});
    for (const ScheduleEvent& event :
         plan_events(c.plan(), units_of(c), c.options)) {
      for (const Action& a : s.on(event)) {
        if (a.unit > 0 && a.kind == ActionKind::gather) {
          EXPECT_TRUE(alive.emplace(std::pair(a.unit, a.plane), 1).second);
          // A backward's plane is all-gathered before its kernels start.
          EXPECT_TRUE(
              a.unit != event.unit || event.kind != EventKind::backward_begin ||
              a.unit == 4)
              << to_string(std::vector{a});
        }
        if (a.unit > 0 && a.kind == ActionKind::release) {
          EXPECT_EQ(alive.erase({a.unit, a.plane}), 1);
        }
        peak = std::max(peak, static_cast<int>(alive.size()));
      }
    }
    EXPECT_TRUE(alive.empty());
    EXPECT_LE(peak, 4);
  }
}

TEST(Interleaved, ResetRestsEverything) {
  const PlanCase c{3, 3, {.delay_wgrad = true, .recompute = true}};
  const auto step = plan_events(c.plan(), units_of(c), c.options);
  for (std::size_t stop = 1; stop < step.size(); ++stop) {
    Scheduler s(specs_of(c), kThreeSlots);
    replay(s, {step.begin(), step.begin() + stop});
    s.on({.kind = EventKind::reset});
    EXPECT_TRUE(s.resting()) << "after " << stop << " events";
    run_step(s, c);
  }
}

// Buffers of a plan: for all-gathers and gradients in flight at once.
TEST(Interleaved, TheArenaHoldsFourUnitsAndThreeGradients) {
  for (const PlanCase& c : testing::plan_cases()) {
    if (c.layers != 16) {
      continue;
    }
    const auto units = testing::blocks(c.layers);
    Scheduler s(units, kThreeSlots);
    const auto actions =
        replay(s, plan_events(c.plan(), units_of(c), c.options));
    const auto plan = SlotPlan::build(slot_lifetimes(units, actions));
    const bool both = c.options.in_flight > 1 && c.microbatches > 1;
    EXPECT_LE(plan.peak_nbytes(), ((both ? 4 : 2) + 3) * kUnit) << c.name();
  }
}

}  // namespace
}  // namespace flatshard
