// Steps as one graph give the bits of eager training: losses and every
// gradient, with a replay in each step after the warm-up. On CPUs a replay runs
// the recorded step again and then restores the host's state. So the host's
// state after a replay is the one that the capture kept.
#include "flatshard/comm/collective_log.h"
#include "flatshard/core/error.h"
#include "flatshard/graphs/model_graphs.h"
#include "flatshard/nn/linear.h"
#include "flatshard/optim/adamw.h"
#include "tests/graphs/deviations.h"
#include "tests/support/case_name.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

namespace flatshard {
namespace {

using testing::before_step;
using testing::evaluations;
using testing::exception_in_a_backward;
using testing::expect_same;
using testing::forward_without_backward;
using testing::GraphCase;
using testing::GraphHooks;
using testing::GraphRun;
using testing::GraphTraining;
using testing::hook_for_two_steps;
using testing::reset_of_the_graphs;
using testing::reset_of_the_runtime;
using testing::train_graphs;

struct StepRuns {
  GraphRun eager;
  GraphRun graphs;
};

StepRuns train_both(GraphCase c, const GraphHooks& hooks = {}) {
  StepRuns runs;
  c.whole_step = true;
  c.graphs = false;
  runs.eager = train_graphs(c, hooks);
  c.graphs = true;
  runs.graphs = train_graphs(c, hooks);
  return runs;
}

void check_case(const GraphCase& c) {
  const StepRuns runs = train_both(c);
  expect_same(runs.eager, runs.graphs);
  EXPECT_EQ(runs.eager.actions, runs.graphs.actions);
  EXPECT_EQ(runs.graphs.stats.captures, 1);
  EXPECT_EQ(runs.graphs.stats.step_replays, c.steps - c.warmup_steps);
  EXPECT_THAT(runs.graphs.stats.fallbacks, ::testing::IsEmpty());
}

class StepGraphParity : public ::testing::TestWithParam<GraphCase> {};

TEST_P(StepGraphParity, B55_EqualsEagerBitForBit) {
  check_case(GetParam());
}

INSTANTIATE_TEST_SUITE_P(
    Pairwise,
    StepGraphParity,
    ::testing::ValuesIn(testing::pairwise_step_cases()),
    testing::kCaseName);

TEST(StepGraph, GathersFromPostForwardShards) {
  check_case({.mesh = {4}, .microbatches = 2, .post_forward_ranks = 2});
}

// An action of a program between two steps: the bits stay, and steps that could
// not be replayed are counted by reason.

struct StepDeviation {
  const char* name;
  GraphHooks hooks;
  const char* reason = nullptr;  ///< of the fallback; null: none
  int eager_steps = 0;           ///< after the warm-up
  int captures = 1;
  bool dropout = false;
  /// If weights are stored unsharded, the action has all-gathered them. A
  /// replay ignores that and refreshes them once more.
  bool gathers_before = false;
};

std::vector<StepDeviation> step_deviations() {
  using Training = GraphTraining;
  return {
      {.name = "EvaluationBetween",
       .hooks = evaluations(),
       .gathers_before = true},
      {.name = "AnEvaluationBeforeTheCapture",
       .hooks = before_step(
           2,
           [](Training& t) {
             const at::NoGradGuard no_grad;
             t.forward(90, 0);
           }),
       .gathers_before = true},
      {.name = "WeightsWrittenByOthers",
       .hooks =
           {.before_step =
                [](Training& t, int) {
                  const at::NoGradGuard no_grad;
                  for (ParamGroup* group : t.runtime().all_groups()) {
                    group->weights().main().local().mul_(0.9);
                  }
                }}},
      {.name = "ScaledGradients",
       .hooks =
           {.before_update =
                [](Training& t, int) {
                  for (ParamGroup* group : t.runtime().groups()) {
                    group->gradients().scale(0.5);
                  }
                }}},
      {.name = "AnOptimizerOnAStreamOfItsOwn",
       .hooks = before_step(
           0,
           [](Training& t) {
             t.optimizer().set_stream(make_stream(
                 at::kCPU,
                 "optimizer",
                 {.delay_seed = 1, .max_delay_us = 2000}));
           })},
      {.name = "AnotherShape",
       .hooks =
           {.before_step = [](Training& t,
                              int step) { t.set_batch(step == 5 ? 3 : 2); }},
       .reason = "an input has another shape, layout or dtype",
       .eager_steps = 1},
      {.name = "GradientsOfAnEarlierBackward",
       .hooks =
           before_step(5, [](Training& t) { t.forward(92, 0).backward(); }),
       .reason = "there are gradients of an earlier backward",
       .eager_steps = 1},
      {.name = "GradientsThatWaitForAReduction",
       .hooks = before_step(
           5,
           [](Training& t) {
             t.runtime().set_sync_gradients(false);
             t.forward(92, 0).backward();
             t.runtime().set_sync_gradients(true);
           }),
       .reason = "there are gradients of an earlier backward",
       .eager_steps = 1},
      {.name = "AnUnshardOfTheProgram",
       .hooks = before_step(
           5,
           [](Training& t) { t.runtime().gathers().unshard(1); }),
       .reason = "weights are unsharded before it starts",
       .eager_steps = 1,
       .gathers_before = true},
      {.name = "ABackwardThatNeverComes",
       .hooks = forward_without_backward(),
       .reason = "weights are unsharded before it starts",
       .eager_steps = 3,  // the next plan has room for it, so a warm-up follows
       .gathers_before = true},
      {.name = "AnExceptionInABackward",
       .hooks = exception_in_a_backward(),
       .reason = "weights are unsharded before it starts",
       .eager_steps = 3,  // the next plan has room for it, so a warm-up follows
       .gathers_before = true},
      {.name = "AnExceptionInsideOfABackward",
       .hooks = before_step(
           5,
           [](Training& t) {
             const auto hook = t.units()[2]->add_forward_hook(
                 [](nn::Module&,
                    const nn::TensorList&,
                    const nn::TensorList& outputs) {
                   outputs[0].register_hook(
                       std::function<void(at::Tensor)>([](const at::Tensor&) {
                         throw std::runtime_error("on purpose");
                       }));
                 });
             const at::Tensor bad = t.forward(95, 0);
             EXPECT_THROW(bad.backward(), std::exception);
           })},
      {.name = "AHook",
       .hooks = hook_for_two_steps([](Training& t) {
         return t.units()[1]->add_forward_hook(
             [](nn::Module&, const nn::TensorList&, const nn::TensorList&) {});
       }),
       .reason = "has forward hooks",
       .eager_steps = 2},
      {.name = "AHookOnAGradient",
       .hooks =
           {.before_step =
                [](Training& t, int step) {
                  GradientPipeline::Hook hook;
                  if (step == 5) {
                    hook = [](const at::Tensor& grad) { grad.mul_(2); };
                  }
                  t.runtime().groups()[0]->gradients().set_hook(hook);
                }},
       .reason = "a gradient has a hook",
       .eager_steps = 1},
      {.name = "InEvaluationMode",
       .hooks =
           {.before_step = [](Training& t,
                              int step) { t.model().train(step != 5); }},
       .reason = "modules were set to train() or eval()",
       .eager_steps = 1,
       .dropout = true},
      {.name = "OtherFlagsAtItsBegin",
       .hooks =
           {.before_step =
                [](Training& t, int step) {
                  t.runtime().set_is_last_microbatch(step != 5);
                }},
       .reason = "it starts with other microbatch flags",
       .eager_steps = 1},
      {.name = "ResetGraphs",
       .hooks = reset_of_the_graphs(),
       .eager_steps = 2,
       .captures = 2},
      {.name = "AnotherPolicy",
       .hooks = before_step(
           5,
           [](Training& t) {
             t.runtime().gathers().set_policy(
                 2,
                 {.reshard_after_forward = false});
           }),
       .eager_steps = 2,
       .captures = 2},
      {.name = "ResetOfTheRuntime", .hooks = reset_of_the_runtime()},
  };
}

class StepGraphDeviations : public ::testing::TestWithParam<StepDeviation> {};

TEST_P(StepGraphDeviations, B66_ChangesNoBit) {
  const StepDeviation& d = GetParam();
  std::vector<std::string> strategies{"zero3"};
  if (d.gathers_before || d.reason == nullptr) {
    strategies.emplace_back("zero1");
  }
  for (const std::string& strategy : strategies) {
    SCOPED_TRACE(strategy);
    const GraphCase c{
        .strategy = strategy,
        .mesh = {2},
        .dropout = d.dropout,
        .max_delay_us = 20};
    const StepRuns runs = train_both(c, d.hooks);
    expect_same(runs.eager, runs.graphs);
    const bool gathered = d.gathers_before && strategy == "zero1";
    if (!gathered) {
      EXPECT_EQ(runs.eager.actions, runs.graphs.actions);
    }
    const GraphStats& stats = runs.graphs.stats;
    EXPECT_EQ(stats.captures, d.captures);
    EXPECT_EQ(
        stats.step_replays,
        c.steps - c.warmup_steps - (gathered ? 0 : d.eager_steps));
    std::vector<std::string> reasons;
    for (const auto& [reason, count] : stats.fallbacks) {
      reasons.push_back(reason);
    }
    if (d.reason == nullptr || gathered) {
      EXPECT_THAT(reasons, ::testing::IsEmpty());
    } else {
      EXPECT_THAT(
          reasons,
          ::testing::ElementsAre(::testing::HasSubstr(d.reason)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    StepGraphDeviations,
    ::testing::ValuesIn(step_deviations()),
    testing::kCaseName);

// Something that a step may not have: its capture fails with the reason, and
// steps stay eager.

struct BadStep {
  const char* name;
  /// Runs after the backward, while a step is recorded.
  std::function<void(GraphTraining& training, const at::Tensor& loss)> behind;
  const char* reason;
};

std::vector<BadStep> bad_steps() {
  using Training = GraphTraining;
  return {
      {.name = "AnException",
       .behind =
           [](Training&, const at::Tensor&) {
             throw std::runtime_error("on purpose");
           },
       .reason = "its capture failed: on purpose"},
      {.name = "WeightsThatChange",
       .behind =
           [](Training& t, const at::Tensor&) {
             AdamW optimizer(t.runtime().groups(), {});
             optimizer.step(1e-2, {});
           },
       .reason = "changed weights; step the optimizer outside"},
      {.name = "WeightsThatStayGathered",
       .behind = [](Training& t,
                    const at::Tensor&) { t.runtime().gathers().unshard(1); },
       .reason = "these units are still in use"},
  };
}

class BadSteps : public ::testing::TestWithParam<BadStep> {};

TEST_P(BadSteps, StayEager) {
  const BadStep& bad = GetParam();
  testing::run_ranks(2, [&](const testing::RankContext& context) {
    const GraphCase c{.mesh = {2}, .whole_step = true};
    GraphTraining training(c, context.mesh());
    int calls = 0;
    StepGraph graph(training.shared_runtime(), [&](const nn::TensorList&) {
      const at::Tensor loss = training.forward(calls, 0);
      loss.backward();
      if (++calls == 3) {  // the step after the warm-up
        bad.behind(training, loss);
      }
      return nn::TensorList{loss};
    });
    AdamW optimizer(training.runtime().groups(), {});
    for (int step = 0; step < 6; ++step) {
      graph.run({});
      optimizer.step(1e-2, {});
      optimizer.zero_grad();
    }
    EXPECT_EQ(calls, 7);
    EXPECT_FALSE(graph.captured());
    const GraphStats stats = graph.stats();
    EXPECT_EQ(stats.captures, 0);
    ASSERT_EQ(stats.fallbacks.size(), 1U);
    const auto& [reason, count] = *stats.fallbacks.begin();
    EXPECT_THAT(reason, ::testing::HasSubstr(bad.reason));
    EXPECT_EQ(count, 4);
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    BadSteps,
    ::testing::ValuesIn(bad_steps()),
    testing::kCaseName);

TEST(StepGraphs, RecomputationThatDrawsAgainStaysEager) {
  const StepRuns runs = train_both({.recompute = true, .dropout = true});
  expect_same(runs.eager, runs.graphs);
  EXPECT_EQ(runs.graphs.stats.step_replays, 0);
  EXPECT_THAT(
      runs.graphs.stats.fallbacks,
      ::testing::ElementsAre(::testing::Pair(
          ::testing::HasSubstr("RecomputeOptions::preserve_rng"),
          6)));
}

TEST(StepGraphs, WhatAReplayReturnsIsTheCallers) {
  testing::run_ranks(1, [](const testing::RankContext& context) {
    const GraphCase c{.whole_step = true};
    GraphTraining training(c, context.mesh());
    int step = 0;
    StepGraph graph(training.shared_runtime(), [&](const nn::TensorList& in) {
      training.forward(0, 0).backward();
      return nn::TensorList{in[0] * 2};
    });
    std::vector<at::Tensor> kept;
    for (; step < 6; ++step) {
      kept.push_back(graph.run({at::full({2}, step)})[0]);
      training.runtime().zero_grad();
    }
    EXPECT_EQ(graph.stats().step_replays, 4);
    for (step = 0; step < 6; ++step) {
      EXPECT_TRUE(at::equal(kept[step], at::full({2}, 2 * step))) << step;
    }
  });
}

// The collectives are the same in the same order, so ranks need not agree.
TEST(StepGraphs, OneRankMayRunAStepEagerly) {
  const StepRuns runs =
      train_both({.mesh = {2}}, {.before_step = [](GraphTraining& t, int step) {
                   t.set_batch(
                       step == 5 && t.runtime().mesh()->rank() == 1 ? 3 : 2);
                 }});
  expect_same(runs.eager, runs.graphs);
  EXPECT_EQ(runs.graphs.stats.step_replays, 6);  // rank 0's
}

// All ranks together launch what they launch without graphs.
TEST(StepGraphs, B65_AReplayLaunchesTheCollectivesOfAnEagerStep) {
  const auto launched = [](bool graphs) {
    std::vector<std::string> found;
    testing::run_ranks(2, [&](const testing::RankContext& context) {
      const GraphCase c{
          .mesh = {2},
          .microbatches = 3,
          .graphs = graphs,
          .whole_step = true};
      const auto mesh = context.mesh();
      GraphTraining training(c, mesh);
      training.run({.before_step = [&](GraphTraining& t, int step) {
        if (step == c.steps - 1) {
          t.runtime().synchronize();
          mesh->world().barrier();
          if (context.rank == 0) {
            context.log->clear();
          }
          mesh->world().barrier();
        }
      }});
      mesh->world().barrier();
      if (context.rank == 0) {
        for (const CollectiveRecord& r : context.log->records()) {
          found.push_back(fmt::format(
              "{} {} {}",
              r.communicator,
              to_string(r.kind),
              r.numel));
        }
      }
      mesh->world().barrier();
    });
    std::erase_if(found, [](const std::string& text) {
      return text.find("barrier") != std::string::npos;
    });
    std::sort(found.begin(), found.end());  // streams go side by side
    return found;
  };
  const auto eager = launched(false);
  EXPECT_GT(eager.size(), 3 * 3 * GraphCase::kLayers);
  EXPECT_EQ(eager, launched(true));
}

TEST(StepGraphs, AMissCanBeAnError) {
  const GraphCase c{.graphs = true, .whole_step = true, .miss_is_error = true};
  try {
    train_graphs(c, {.before_step = [](GraphTraining& t, int step) {
                   t.set_batch(step == 4 ? 3 : 2);
                 }});
    FAIL() << "did not throw";
  } catch (const Error& e) {
    EXPECT_THAT(
        e.what(),
        ::testing::HasSubstr(
            "the step cannot be replayed as a CUDA graph: an input has another "
            "shape, layout or dtype"));
  }
}

TEST(StepGraphs, AreNotCalledInsideOfAStep) {
  const GraphCase c{.whole_step = true};
  try {
    train_graphs(
        c,
        {.before_step = [](GraphTraining& t, int step) {
          if (step == 4) {
            const auto hook = t.units()[1]->add_forward_hook(
                [&](nn::Module&, const nn::TensorList&, const nn::TensorList&) {
                  t.step_graph()->run({});
                });
            t.forward(91, 0);
          }
        }});
    FAIL() << "did not throw";
  } catch (const Error& e) {
    EXPECT_THAT(
        e.what(),
        ::testing::HasSubstr("expected a call between two steps"));
  }
}

TEST(StepGraphs, WhatTheyDoNotGoWithIsRefusedByName) {
  testing::run_ranks(1, [](const testing::RankContext& context) {
    const auto message = [&](RuntimeOptions runtime, bool offload = false) {
      runtime.graphs.enabled = true;
      nn::Linear model(4, 4);
      try {
        const auto made = fully_shard(
            *model,
            context.mesh(),
            {.units = {model.get()},
             .group = {.offload = offload},
             .runtime = runtime});
        StepGraph graph(made, [](const nn::TensorList&) {
          return nn::TensorList{};
        });
      } catch (const Error& e) {
        return e.message();
      }
      return std::string("did not throw");
    };
    const auto expect = [](const std::string& text, const char* name) {
      EXPECT_THAT(text, ::testing::HasSubstr(name));
    };
    const GraphOptions steps{.whole_step = true, .emulate_on_cpu = true};
    expect(
        message({.graphs = {.whole_step = true}}),
        "requires a mesh of GPUs");
    expect(message({.graphs = {.emulate_on_cpu = true}}), "whole_step");
    expect(
        message({.copy_engines = CopyEngines::all(), .graphs = steps}),
        "parallelism.copy_engines");
    expect(
        message({.slots_on_demand = true, .graphs = steps}),
        "slots_on_demand");
    expect(
        message({.unused_grads_stay_undefined = true, .graphs = steps}),
        "unused_grads_stay_undefined");
    expect(
        message({.debug = {.poison = true}, .graphs = steps}),
        "DebugOptions::poison");
    expect(
        message({.debug = {.strict = true}, .graphs = steps}),
        "DebugOptions::strict");
    expect(message({.graphs = steps}, /*offload=*/true), "offload");
  });
}

// The full matrix on one rank: build/tests/graphs_step_test
// --gtest_also_run_disabled_tests --gtest_filter='*WholeMatrix*'
TEST(StepGraphMatrix, DISABLED_WholeMatrix) {
  for (GraphCase c : testing::all_step_cases(1)) {
    SCOPED_TRACE(c.name());
    c.steps = 20;
    check_case(c);
  }
}

}  // namespace
}  // namespace flatshard
