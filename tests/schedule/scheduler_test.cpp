#include "flatshard/schedule/scheduler.h"

#include "flatshard/core/error.h"
#include "flatshard/schedule/simulate.h"

#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>

namespace flatshard {
namespace {

using enum EventKind;

// root (no parameters) around four units of 100 bytes.
std::vector<UnitSpec> four_blocks() {
  std::vector<UnitSpec> units{{.name = "root"}};
  for (int i = 0; i < 4; ++i) {
    units.push_back(
        {.name = "b" + std::to_string(i),
         .parent = 0,
         .weights_nbytes = {100},
         .grad_nbytes = 100});
  }
  return units;
}

std::string run(Scheduler& s, const ScheduleEvent& event) {
  return to_string(s.on(event));
}

TEST(Scheduler, GoldenStepOfZero3) {
  EXPECT_EQ(
      to_string(simulate_step(four_blocks(), {.prefetch = 1})),
      // forward: one unit ahead, the last one is kept
      "gather(1) gather(2) await(1) release(1) "
      "gather(3) await(2) release(2) "
      "gather(4) await(3) release(3) "
      "await(4) "
      // backward: unit 4 is still unsharded, 3 is queued before its kernels
      "gather'(3) acquire_grads(4) release(4) "
      "gather'(2) await(3) reduce(4) acquire_grads(3) release(3) "
      "gather'(1) await(2) reduce(3) drain(4) acquire_grads(2) release(2) "
      "await(1) reduce(2) drain(3) acquire_grads(1) release(1) "
      "reduce(1) drain(2) drain(1) join");
}

// Its unsharded weights and its reduced gradient never exist at once: with an
// embedding in it, it is the largest unit.
TEST(Scheduler, ARootsWeightsGoBeforeItsReduction) {
  auto units = four_blocks();
  units[0].weights_nbytes = units[1].weights_nbytes;
  units[0].grad_nbytes = units[1].grad_nbytes;
  const std::string actions = to_string(simulate_step(units, {.prefetch = 1}));
  EXPECT_NE(actions.find("release(0) reduce(0)"), std::string::npos) << actions;
  EXPECT_EQ(actions.find("release(0)"), actions.rfind("release(0)"));
}

TEST(Scheduler, NoPrefetchGathersOnDemand) {
  const auto actions = simulate_step(four_blocks(), {.prefetch = 0});
  int gathered = 0;
  for (const Action& a : actions) {
    gathered += a.kind == ActionKind::gather;
    gathered -= a.kind == ActionKind::release;
    EXPECT_LE(gathered, 1);
  }
}

TEST(Scheduler, GatheredUnitsAreBoundedByThePrefetchDepth) {
  for (const int prefetch : {0, 1, 2, 3}) {
    const auto actions = simulate_step(four_blocks(), {.prefetch = prefetch});
    int gathered = 0;
    int most = 0;
    int grads = 0;
    int most_grads = 0;
    for (const Action& a : actions) {
      gathered += a.kind == ActionKind::gather;
      gathered -= a.kind == ActionKind::release;
      grads += a.kind == ActionKind::acquire_grads;
      grads -= a.kind == ActionKind::drain;
      most = std::max(most, gathered);
      most_grads = std::max(most_grads, grads);
    }
    EXPECT_EQ(most, 1 + prefetch);
    EXPECT_EQ(most_grads, 2);
    EXPECT_EQ(gathered, 0);
    EXPECT_EQ(grads, 0);
  }
}

TEST(Scheduler, AsManyGradientSlotsLiveAsItMay) {
  const auto most = [](const std::vector<Action>& actions) {
    int live = 0;
    int most = 0;
    for (const Action& a : actions) {
      live += a.kind == ActionKind::acquire_grads;
      live -= a.kind == ActionKind::drain;
      most = std::max(most, live);
    }
    EXPECT_EQ(live, 0);
    return most;
  };
  Scheduler changed(four_blocks(), {});
  for (const int slots : {1, 2, 3}) {
    const auto actions =
        simulate_step(four_blocks(), {.max_grad_slots = slots});
    EXPECT_EQ(most(actions), slots);
    changed.set_max_grad_slots(slots);
    const auto step = plain_step_events(four_blocks(), {0, 1, 1, 1, 1});
    EXPECT_EQ(most(replay(changed, step)), slots);
  }
  EXPECT_THROW(changed.set_max_grad_slots(0), Error);
}

// An event announces the microbatch of the backwards that start after it.
TEST(Scheduler, B46_MicrobatchesWithoutSyncAreAccumulated) {
  const auto units = four_blocks();
  Scheduler s(units, {.prefetch = 1});
  const auto counts = [&](bool sync) {
    s.on({.kind = microbatch, .is_last = sync, .sync = sync});
    int reduced = 0;
    int accumulated = 0;
    for (const Action& a :
         replay(s, plain_step_events(units, {0, 1, 1, 1, 1}))) {
      reduced += a.kind == ActionKind::reduce;
      accumulated += a.kind == ActionKind::accumulate;
    }
    return std::pair(reduced, accumulated);
  };
  EXPECT_EQ(counts(false), std::pair(0, 4));
  EXPECT_EQ(counts(false), std::pair(0, 4));
  EXPECT_EQ(counts(true), std::pair(4, 0));
}

TEST(Scheduler, ResidentUnitsAreGatheredOncePerChange) {
  auto units = four_blocks();
  for (UnitSpec& unit : units) {
    unit.resident = true;
    unit.reduce_every_microbatch = false;
  }
  Scheduler s(units, {.prefetch = 1});
  const auto step = plain_step_events(units, {0, 1, 1, 1, 1});
  const auto count = [](const std::vector<Action>& actions, ActionKind kind) {
    return std::count_if(
        actions.begin(),
        actions.end(),
        [kind](const Action& a) { return a.kind == kind; });
  };
  s.on({.kind = microbatch, .is_last = false});
  auto first = replay(s, step);
  EXPECT_EQ(count(first, ActionKind::gather), 4);
  EXPECT_EQ(count(first, ActionKind::reduce), 0);
  EXPECT_EQ(count(first, ActionKind::accumulate), 4);
  s.on({.kind = microbatch, .is_last = true});
  auto second = replay(s, step);
  EXPECT_EQ(count(second, ActionKind::gather), 0);
  EXPECT_EQ(count(second, ActionKind::reduce), 4);
  s.on({.kind = weights_changed});
  auto third = replay(s, step);
  EXPECT_EQ(count(third, ActionKind::gather), 4);
  EXPECT_EQ(count(third, ActionKind::release), 0);
}

TEST(Scheduler, EvalReleasesEveryUnit) {
  Scheduler s(four_blocks(), {});
  for (const ScheduleEvent& e :
       plain_step_events(four_blocks(), {0, 1, 1, 1, 1})) {
    if (e.kind == task_begin) {
      break;
    }
    ScheduleEvent without_grad = e;
    without_grad.needs_backward = false;
    s.on(without_grad);
  }
  EXPECT_TRUE(s.resting());
  EXPECT_EQ(s.num_gathered(), 0);
}

TEST(Scheduler, R11_UnitThatDidNotRunIsReleasedAfterItsPrefetch) {
  Scheduler s(four_blocks(), {.prefetch = 1});
  s.on({.kind = forward_begin, .unit = 0, .call = 0});
  EXPECT_EQ(
      run(s, {.kind = forward_begin, .unit = 1, .call = 1}),
      "gather(2) await(1)");
  EXPECT_EQ(run(s, {.kind = forward_end, .unit = 1, .call = 1}), "release(1)");
  EXPECT_EQ(run(s, {.kind = forward_end, .unit = 0, .call = 0}), "release(2)");
  EXPECT_TRUE(s.resting());
}

// Units 1, 2 and 1 again: two modules of unit 1 with another between them.
std::string forward_of_two_modules(Scheduler& s, bool second_runs, bool grad) {
  std::string text = run(s, {.kind = forward_begin, .unit = 0, .call = 0});
  for (const UnitId u : {1, 2, 1}) {
    const bool is_last = text.find("(2)") != std::string::npos && u == 1;
    if (is_last && !second_runs) {
      break;
    }
    text += run(s, {.kind = forward_begin, .unit = u, .call = u}) + " ";
    text += run(s,
                {.kind = forward_end,
                 .unit = u,
                 .call = u,
                 .needs_backward = grad,
                 .more_follow = u == 1 && !is_last}) +
            " ";
  }
  return text + run(s,
                    {.kind = forward_end,
                     .unit = 0,
                     .call = 0,
                     .needs_backward = grad});
}

TEST(Scheduler, WeightsStayForModulesOfTheUnitThatFollow) {
  for (const bool grad : {false, true}) {
    Scheduler s(four_blocks(), {.prefetch = 0});
    EXPECT_EQ(
        forward_of_two_modules(s, true, grad),
        "gather(1) await(1)  gather(2) await(2) release(2)  release(1) ");
    // One that does not come after all: until the forward ends, or its
    // backward.
    EXPECT_EQ(
        forward_of_two_modules(s, false, grad),
        std::string("gather(1) await(1)  gather(2) await(2) release(2) ") +
            (grad ? "" : "release(1)"));
    EXPECT_EQ(s.num_gathered(), grad ? 1 : 0);
    s.on({.kind = weights_changed});
    EXPECT_EQ(s.num_gathered(), 0);
  }
}

TEST(Scheduler, UnitThatRunsAgainIsNoPrefetch) {
  Scheduler s(four_blocks(), {.prefetch = 1});
  std::string text;
  for (int step = 0; step < 2; ++step) {
    s.on({.kind = forward_begin, .unit = 0, .call = 0});
    for (const UnitId u : {1, 1, 3}) {
      text = run(s, {.kind = forward_begin, .unit = u, .call = u}) + " " + text;
      s.on({.kind = forward_end, .unit = u, .call = u});
    }
    s.on({.kind = forward_end, .unit = 0, .call = 0});
    if (step == 0) {
      text.clear();
    }
  }
  // The second step runs the last call first. Unit 3 is all-gathered before
  // both.
  EXPECT_EQ(text, "await(3) gather(1) await(1) gather(3) await(1) ");
}

// Returns a program that calls its blocks one after the other, without the
// root.
std::vector<ScheduleEvent> without_root(
    const std::vector<UnitSpec>& units,
    const std::vector<UnitId>& order) {
  std::vector<ScheduleEvent> events{{.kind = weights_changed}};
  for (const UnitId u : order) {
    events.push_back({.kind = forward_begin, .unit = u, .call = u});
    events.push_back(
        {.kind = forward_end, .unit = u, .call = u, .needs_backward = true});
  }
  ScheduleEvent begin{.kind = task_begin, .task = 0};
  for (const UnitId u : order) {
    begin.expected.emplace_back(u, 1);
    begin.calls.emplace_back(u, 1);
  }
  events.push_back(begin);
  for (auto u = order.rbegin(); u != order.rend(); ++u) {
    events.push_back(
        {.kind = backward_begin, .unit = *u, .call = *u, .task = 0});
    events.push_back({.kind = wgrad_done, .unit = *u, .task = 0});
  }
  events.push_back({.kind = task_end, .task = 0, .outermost = true});
  return events;
}

TEST(Scheduler, BlocksThatAreCalledWithoutTheRoot) {
  for (const std::vector<UnitId>& order :
       {std::vector<UnitId>{1, 2, 3, 4}, std::vector<UnitId>{3, 1, 4, 2}}) {
    Scheduler s(four_blocks(), {.prefetch = 1});
    const auto step = without_root(four_blocks(), order);
    const auto first = replay(s, step);  // learns the order
    EXPECT_TRUE(s.resting());
    for (int i = 0; i < 3; ++i) {
      const auto actions = replay(s, step);
      EXPECT_TRUE(s.resting());
      EXPECT_EQ(s.num_gathered(), 0);
      // The golden step of ZeRO-3, as the root has it.
      EXPECT_EQ(
          to_string(actions),
          fmt::format(
              "gather({0}) gather({1}) await({0}) release({0}) gather({2}) "
              "await({1}) release({1}) gather({3}) await({2}) release({2}) "
              "await({3}) gather'({2}) acquire_grads({3}) release({3}) "
              "gather'({1}) await({2}) reduce({3}) acquire_grads({2}) "
              "release({2}) gather'({0}) await({1}) reduce({2}) drain({3}) "
              "acquire_grads({1}) release({1}) await({0}) reduce({1}) "
              "drain({2}) acquire_grads({0}) release({0}) reduce({0}) "
              "drain({1}) drain({0}) join",
              order[0],
              order[1],
              order[2],
              order[3]));
    }
  }
}

TEST(Scheduler, AUnitsOwnCallLeavesTheRootsOrder) {
  Scheduler s(four_blocks(), {.prefetch = 1});
  const auto step = plain_step_events(four_blocks(), {0, 1, 1, 1, 1});
  const std::string golden = to_string(replay(s, step));
  for (const UnitId u : {1, 3, 4}) {
    s.on({.kind = forward_begin, .unit = u, .call = 90});
    s.on({.kind = forward_end, .unit = u, .call = 90});
    EXPECT_TRUE(s.resting());
    EXPECT_EQ(s.num_gathered(), 0);
    EXPECT_EQ(to_string(replay(s, step)), golden);
  }
  // Between a forward and its backward, too.
  std::vector<Action> actions;
  for (const ScheduleEvent& event : step) {
    if (event.kind == task_begin) {
      s.on({.kind = forward_begin, .unit = 2, .call = 91});
      s.on({.kind = forward_end, .unit = 2, .call = 91});
    }
    const auto some = s.on(event);
    actions.insert(actions.end(), some.begin(), some.end());
  }
  EXPECT_EQ(to_string(actions), golden);
}

TEST(Scheduler, AUnitThatTheOrderDoesNotKnowIsNotKept) {
  Scheduler s(four_blocks(), {.prefetch = 1});
  s.on({.kind = forward_begin, .unit = 0, .call = 0});
  for (const UnitId u : {1, 2}) {
    s.on({.kind = forward_begin, .unit = u, .call = u});
    s.on({.kind = forward_end, .unit = u, .call = u});
  }
  s.on({.kind = forward_end, .unit = 0, .call = 0});
  s.on({.kind = forward_begin, .unit = 0, .call = 0});
  s.on({.kind = forward_begin, .unit = 4, .call = 1});
  EXPECT_EQ(
      run(s,
          {.kind = forward_end, .unit = 4, .call = 1, .needs_backward = true}),
      "release(4)");
}

TEST(Scheduler, TwoForwardsThenTwoBackwards) {
  const auto units = four_blocks();
  Scheduler s(units, {.prefetch = 1});
  auto step = plain_step_events(units, {0, 1, 1, 1, 1});
  const auto begin_backward =
      std::find_if(step.begin(), step.end(), [](const ScheduleEvent& e) {
        return e.kind == task_begin;
      });
  const std::vector<ScheduleEvent> forward(step.begin(), begin_backward);
  const std::vector<ScheduleEvent> backward(begin_backward, step.end());
  const auto shifted = [](std::vector<ScheduleEvent> events, int by) {
    for (ScheduleEvent& e : events) {
      e.call += by;
      e.task += e.task >= 0 ? by : 0;
    }
    return events;
  };
  replay(s, forward);
  replay(s, shifted(forward, 10));
  for (const int by : {0, 10}) {
    const auto actions = replay(s, shifted(backward, by));
    EXPECT_TRUE(s.resting());
    EXPECT_EQ(
        std::count_if(
            actions.begin(),
            actions.end(),
            [](const Action& a) { return a.kind == ActionKind::reduce; }),
        4);
  }
}

TEST(Scheduler, UnitIsKeptUntilAllItsGradientsAndInputsAreDone) {
  Scheduler s(four_blocks(), {.prefetch = 0});
  s.on({.kind = task_begin, .task = 7, .expected = {{2, 2}}});
  EXPECT_EQ(
      run(s,
          {.kind = backward_begin,
           .unit = 2,
           .call = 1,
           .task = 7,
           .waits_for_inputs = true}),
      "gather'(2) await(2) acquire_grads(2)");
  EXPECT_EQ(run(s, {.kind = wgrad_done, .unit = 2, .task = 7}), "");
  EXPECT_EQ(run(s, {.kind = inputs_done, .unit = 2, .call = 1, .task = 7}), "");
  EXPECT_EQ(run(s, {.kind = wgrad_done, .unit = 2, .task = 7}), "release(2)");
}

TEST(Scheduler, B36_RecomputeIsTheBackwardGather) {
  Scheduler s(four_blocks(), {.prefetch = 1});
  s.on({.kind = task_begin, .task = 1});
  EXPECT_EQ(
      run(s, {.kind = recompute_begin, .unit = 3, .call = 5, .task = 1}),
      "gather'(3) await(3)");
  EXPECT_EQ(
      run(s, {.kind = recompute_end, .unit = 3, .call = 5, .task = 1}),
      "");
  s.on({.kind = task_begin, .task = 2, .expected = {{3, 1}}});
  EXPECT_EQ(
      run(s,
          {.kind = backward_begin,
           .unit = 3,
           .call = 5,
           .task = 2,
           .waits_for_inputs = true}),
      "gather'(2) acquire_grads(3)");
  s.on({.kind = wgrad_done, .unit = 3, .task = 2});
  EXPECT_EQ(run(s, {.kind = task_end, .task = 2}), "release(3)");
  EXPECT_EQ(
      run(s, {.kind = task_end, .task = 1, .outermost = true}),
      "release(2) reduce(3) drain(3) join");
  EXPECT_TRUE(s.resting());
}

TEST(Scheduler, ResetRestsEverything) {
  const auto units = four_blocks();
  const auto step = plain_step_events(units, {0, 1, 1, 1, 1});
  for (std::size_t stop = 1; stop < step.size(); ++stop) {
    Scheduler s(units, {.prefetch = 2});
    replay(s, {step.begin(), step.begin() + stop});
    s.on({.kind = reset});
    EXPECT_TRUE(s.resting()) << "after " << stop << " events";
    replay(s, step);
    EXPECT_TRUE(s.resting());
  }
}

TEST(Scheduler, B45_MisnestedForwardIsAnErrorByName) {
  Scheduler s(four_blocks(), {});
  s.on({.kind = forward_begin, .unit = 1, .call = 0});
  try {
    s.on({.kind = forward_end, .unit = 2, .call = 0});
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::usage);
    EXPECT_NE(e.message().find("b1"), std::string::npos);
  }
}

TEST(Scheduler, BadOptionsAreRefused) {
  EXPECT_THROW(Scheduler(four_blocks(), {.prefetch = -1}), Error);
  EXPECT_THROW(Scheduler(four_blocks(), {.max_grad_slots = 0}), Error);
}

TEST(Scheduler, TaskThatAsksForNoParameterReducesNothing) {
  Scheduler s(four_blocks(), {.prefetch = 0});
  auto events = plain_step_events(s.units(), {0, 0, 0, 0, 0});
  for (ScheduleEvent& event : events) {
    event.reduces = event.kind != task_begin;
  }
  for (const Action& a : replay(s, events)) {
    EXPECT_NE(a.kind, ActionKind::acquire_grads);
    EXPECT_NE(a.kind, ActionKind::reduce);
  }
  EXPECT_TRUE(s.resting());
  // The next task does again.
  const auto plain = plain_step_events(s.units(), {0, 1, 1, 1, 1});
  const auto actions = replay(s, plain);
  EXPECT_EQ(std::ranges::count(actions, ActionKind::reduce, &Action::kind), 4);
}

// -- policies, unshard and reshard --------------------------------------------

// Units 1 to 4 below the root run forward and backward; returns the backward.
std::string forward_then_backward(Scheduler& s) {
  s.on({.kind = forward_begin, .unit = 0, .call = 0});
  for (UnitId u = 1; u <= 4; ++u) {
    s.on({.kind = forward_begin, .unit = u, .call = u});
    s.on({.kind = forward_end, .unit = u, .call = u, .needs_backward = true});
  }
  s.on({.kind = forward_end, .unit = 0, .call = 0, .needs_backward = true});
  s.on(
      {.kind = task_begin,
       .task = 0,
       .expected = {{1, 1}, {2, 1}, {3, 1}, {4, 1}},
       .calls = {{1, 1}, {2, 1}, {3, 1}, {4, 1}}});
  std::string text;
  for (UnitId u = 4; u >= 1; --u) {
    text += run(s,
                {.kind = backward_begin,
                 .unit = u,
                 .call = u,
                 .task = 0,
                 .waits_for_inputs = true}) +
            " ";
    text += run(s, {.kind = wgrad_done, .unit = u, .task = 0}) + " ";
    text +=
        run(s, {.kind = inputs_done, .unit = u, .call = u, .task = 0}) + " ";
  }
  return text + run(s, {.kind = task_end, .task = 0, .outermost = true});
}

TEST(Scheduler, UnitsThatStayAfterTheBackwardRest) {
  Scheduler s(four_blocks(), {.prefetch = 0});
  s.set_policy(2, {.reshard_after_backward = false});
  forward_then_backward(s);
  EXPECT_EQ(s.gathered_planes(2), PlaneSet{0});
  EXPECT_TRUE(s.gathered_planes(1).empty());
  EXPECT_TRUE(s.resting());
  // New weights are all-gathered again.
  EXPECT_EQ(run(s, {.kind = weights_changed}), "release(2)");
}

TEST(Scheduler, UnitsWhoseBackwardReadsNoWeightsAreNotGathered) {
  Scheduler s(four_blocks(), {.prefetch = 1});
  s.set_policy(2, {.unshard_in_backward = false});
  const std::string backward = forward_then_backward(s);
  EXPECT_EQ(backward.find("gather'(2)"), std::string::npos) << backward;
  EXPECT_NE(backward.find("gather'(1)"), std::string::npos) << backward;
  EXPECT_TRUE(s.resting());
}

// Unit 2 runs before unit 1. A rank that uses the parameters of 2 passes the
// gradient on after the gradients of 1. Another one may do so before they
// exist. Units 1 and 2 are due when the backward of 3 starts. A rank that does
// not use the parameter of 2 has all of its gradients by then, and still waits
// for 1.
TEST(Scheduler, WhatIsCompleteWaitsForWhatWasDueBeforeIt) {
  const auto reductions = [](bool uses_2) {
    Scheduler s(four_blocks(), {});
    ScheduleEvent begin{.kind = task_begin, .task = 0};
    begin.calls = {{1, 1}, {2, 1}, {3, 1}};
    begin.expected = {{1, 1}, {3, 1}};
    std::vector<ScheduleEvent> events;
    for (const UnitId unit : {1, 2, 3}) {
      events.push_back({.kind = forward_begin, .unit = unit, .call = unit});
      events.push_back({.kind = forward_end, .unit = unit, .call = unit});
    }
    if (uses_2) {
      begin.expected.emplace_back(2, 1);
    }
    events.push_back(begin);
    for (const UnitId unit : {1, 2, 3}) {
      events.push_back(
          {.kind = backward_begin, .unit = unit, .call = unit, .task = 0});
    }
    for (const UnitId unit : {1, 2, 3}) {
      if (unit != 2 || uses_2) {
        events.push_back({.kind = wgrad_done, .unit = unit, .task = 0});
      }
    }
    events.push_back({.kind = task_end, .task = 0, .outermost = true});
    std::vector<UnitId> order;
    for (const ScheduleEvent& event : events) {
      for (const Action& action : s.on(event)) {
        if (action.kind == ActionKind::reduce) {
          order.push_back(action.unit);
        }
      }
    }
    return order;
  };
  EXPECT_EQ(reductions(true), (std::vector<UnitId>{1, 2, 3}));
  EXPECT_EQ(reductions(false), reductions(true));
}

TEST(Scheduler, RanksThatUseOtherParametersReduceInOneOrder) {
  const auto reductions = [](bool used) {
    std::vector<UnitSpec> units = four_blocks();
    units[0].weights_nbytes = {100};
    units[0].grad_nbytes = 100;
    Scheduler s(units, {});
    CallId call = 0;
    s.on({.kind = forward_begin, .unit = 0, .call = call});
    for (const UnitId unit : {2, 1}) {
      s.on({.kind = forward_begin, .unit = unit, .call = ++call});
      s.on({.kind = forward_end, .unit = unit, .call = call});
    }
    s.on({.kind = forward_end, .unit = 0, .call = 0});
    ScheduleEvent begin{.kind = task_begin, .task = 0};
    begin.calls = {{0, 1}, {1, 1}, {2, 1}};
    begin.expected = {{0, 1}, {1, 1}};
    if (used) {
      begin.expected.emplace_back(2, 1);
    }
    const ScheduleEvent wgrad_of_1{.kind = wgrad_done, .unit = 1, .task = 0};
    std::vector<ScheduleEvent> events{
        begin,
        {.kind = backward_begin, .unit = 0, .call = 0, .task = 0},
        {.kind = backward_begin, .unit = 1, .call = 2, .task = 0}};
    if (used) {
      events.push_back(wgrad_of_1);
    }
    events.push_back({.kind = backward_begin, .unit = 2, .call = 1, .task = 0});
    events.push_back(
        used ? ScheduleEvent{.kind = wgrad_done, .unit = 2, .task = 0}
             : wgrad_of_1);
    events.push_back({.kind = wgrad_done, .unit = 0, .task = 0});
    events.push_back({.kind = task_end, .task = 0, .outermost = true});
    std::vector<UnitId> order;
    for (const ScheduleEvent& event : events) {
      for (const Action& action : s.on(event)) {
        if (action.kind == ActionKind::reduce) {
          order.push_back(action.unit);
        }
      }
    }
    return order;
  };
  EXPECT_EQ(reductions(true), (std::vector<UnitId>{1, 0, 2}));
  EXPECT_EQ(reductions(false), reductions(true));
}

TEST(Scheduler, ChosenPrefetchesReplaceThePredictedOnes) {
  Scheduler s(four_blocks(), {.prefetch = 1});
  s.set_policy(1, {.forward_prefetch = std::vector<UnitId>{3, 4}});
  s.set_policy(2, {.forward_prefetch = std::vector<UnitId>{}});
  s.on({.kind = forward_begin, .unit = 0, .call = 0});
  EXPECT_EQ(
      run(s, {.kind = forward_begin, .unit = 1, .call = 1}),
      "gather(3) gather(4) await(1)");
  s.on({.kind = forward_end, .unit = 1, .call = 1});
  EXPECT_EQ(
      run(s, {.kind = forward_begin, .unit = 2, .call = 2}),
      "gather(2) await(2)");
}

TEST(Scheduler, UnshardGathersAndReshardReleases) {
  Scheduler s(four_blocks(), {.prefetch = 1});
  EXPECT_EQ(run(s, {.kind = unshard, .unit = 2}), "gather(2) await(2)");
  EXPECT_TRUE(s.resting());
  EXPECT_EQ(run(s, {.kind = reshard, .unit = 2}), "release(2)");
  EXPECT_EQ(run(s, {.kind = reshard, .unit = 2}), "");
  EXPECT_EQ(run(s, {.kind = unshard, .unit = 2, .awaits = false}), "gather(2)");
  EXPECT_EQ(run(s, {.kind = unshard, .unit = 2}), "await(2)");
  // The next use owns them now, and an open forward keeps them.
  s.on({.kind = forward_begin, .unit = 2, .call = 1});
  EXPECT_EQ(run(s, {.kind = reshard, .unit = 2}), "");
  EXPECT_EQ(
      run(s, {.kind = forward_end, .unit = 2, .call = 1}),
      "release(2) release(3)");
  EXPECT_TRUE(s.resting());
}

// The Executor uses a collective for weights that a program may write next.
TEST(Scheduler, AGatherKnowsThatTheProgramAskedForIt) {
  for (const bool by_program : {false, true}) {
    Scheduler s(four_blocks(), {.prefetch = 1});
    const auto actions = s.on(
        {.kind = unshard,
         .unit = 2,
         .awaits = false,
         .by_program = by_program});
    ASSERT_EQ(actions.size(), 1U);
    EXPECT_EQ(actions.front().by_program, by_program);
    for (const Action& action :
         s.on({.kind = forward_begin, .unit = 1, .call = 1})) {
      EXPECT_FALSE(action.by_program) << to_string(action.kind);
    }
  }
}

TEST(Scheduler, PoliciesNameUnitsThatExist) {
  Scheduler s(four_blocks(), {.prefetch = 1});
  EXPECT_THROW(s.set_policy(5, {}), Error);
  EXPECT_THROW(
      s.set_policy(1, {.backward_prefetch = std::vector<UnitId>{9}}),
      Error);
}

}  // namespace
}  // namespace flatshard
