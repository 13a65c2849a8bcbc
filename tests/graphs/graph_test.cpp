// Regions as graphs give the bits of eager training. The losses and every
// gradient are equal, the expected replays happen, and nothing runs eagerly in
// their place. On CPUs a replay runs the captured function again; everything
// else is the same. With FLATSHARD_GRAPH_DEVICE=cuda the same cases run on a
// GPU.
#include "flatshard/graphs/model_graphs.h"
#include "tests/graphs/deviations.h"

#include "flatshard/core/error.h"
#include "flatshard/graphs/static_tensor.h"
#include "flatshard/nn/linear.h"
#include "flatshard/optim/adamw.h"
#include "tests/runtime/factor_model.h"
#include "tests/support/case_name.h"
#include "tests/support/counted_operation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

void expect_replays(const GraphCase& c, const GraphRun& run) {
  const std::int64_t steps = c.steps - c.warmup_steps;
  const std::int64_t regions = steps * c.microbatches * GraphCase::kLayers *
                               static_cast<std::int64_t>(c.regions.size());
  const bool twice = c.recompute && !c.regions.contains("block");
  EXPECT_EQ(run.stats.forward_replays, regions * (twice ? 2 : 1));
  EXPECT_EQ(run.stats.backward_replays, regions);
  EXPECT_THAT(run.stats.fallbacks, ::testing::IsEmpty());
}

class GraphParity : public ::testing::TestWithParam<GraphCase> {};

TEST_P(GraphParity, B55_EqualsEagerBitForBit) {
  GraphCase c = GetParam();
  c.graphs = false;
  const GraphRun eager = train_graphs(c);
  c.graphs = true;
  const GraphRun graphs = train_graphs(c);
  expect_same(eager, graphs);
  EXPECT_EQ(eager.actions, graphs.actions);
  expect_replays(c, graphs);
}

// Hooks, all-gathers and reductions stay outside: a recompute in backward uses
// the weights that were unsharded for it.
TEST(Graphs, B65_LaunchesTheSameActions) {
  GraphCase c{
      .regions = {"attn"},
      .mesh = {2},
      .recompute = true,
      .microbatches = 3,
      .steps = 5};
  c.graphs = false;
  const std::string eager = train_graphs(c).actions;
  c.graphs = true;
  const GraphRun graphs = train_graphs(c);
  EXPECT_EQ(graphs.actions, eager);
  expect_replays(c, graphs);
}

// A captured backward reads the results that the captured forward keeps. On
// CPUs a replay calls the operations again, so that they count.
TEST(Graphs, L1_ReplaysLaunchNoAttentionInTheBackward) {
  testing::CountedOperation calls(
      "aten::_scaled_dot_product_flash_attention_for_cpu");
  GraphCase c{.recompute = true, .microbatches = 3, .steps = 6};
  c.graphs = false;
  const GraphRun recomputed = train_graphs(c);
  const std::int64_t once = calls.take() / 2;
  c.keep_attention = true;
  expect_same(recomputed, train_graphs(c));
  EXPECT_EQ(calls.take(), once);
  c.graphs = true;
  const GraphRun graphs = train_graphs(c);
  expect_same(recomputed, graphs);
  expect_replays(c, graphs);
  // A capture calls them, too.
  EXPECT_EQ(calls.take(), once + GraphCase::kLayers);
}

// An additional action of a program: the bits stay, and calls that could not be
// replayed are counted by reason.

struct Deviation {
  const char* name;
  GraphHooks hooks;
  /// The reason of the fallback that it causes, or null.
  const char* reason = nullptr;
  /// The step needs buffers that the plan has no place for, so another plan is
  /// created; or a user keeps memory that regions shared.
  int captures_again = 0;
  bool recompute = false;
};

int& hook_calls() {
  static thread_local int calls = 0;
  return calls;
}

std::vector<at::Tensor>& kept_tensors() {
  static thread_local std::vector<at::Tensor> tensors;
  return tensors;
}

nn::Module& inner_module(GraphTraining& training) {
  return *dynamic_cast<nn::Module*>(
      training.units()[1]->children().front().get());
}

std::vector<Deviation> deviations() {
  using Training = GraphTraining;
  return {
      {.name = "EvaluationBetween", .hooks = evaluations()},
      {.name = "TwoForwardsBeforeTheBackward",
       .hooks =
           {.before_backward =
                [](Training& t, int step, at::Tensor& loss) {
                  if (step == 5) {
                    loss = loss + t.forward(91, 0);
                  }
                }},
       .reason = "an earlier forward of it waits for its backward",
       .captures_again = 1},
      {.name = "AnotherShape",
       .hooks = before_step(
           5,
           [](Training& t) {
             t.runtime().set_is_last_microbatch(false);
             t.forward(92, 0, /*batch=*/3).backward();
           }),
       .reason = "an input has another shape, layout or dtype"},
      {.name = "BackwardTwice",
       .hooks =
           {.before_backward =
                [](Training& t, int step, at::Tensor& loss) {
                  if (step == 5) {
                    loss.backward({}, /*retain_graph=*/true);
                  }
                }},
       .captures_again = 1},
      {.name = "ABackwardOfSomeParameters",
       .hooks =
           {.before_backward =
                [](Training& t, int step, at::Tensor& loss) {
                  if (step == 5) {
                    loss.backward(
                        {},
                        /*retain_graph=*/true,
                        /*create_graph=*/false,
                        {{t.units()[1]->parameters().front()}});
                  }
                }},
       .reason = "a parameter gets no gradient in this backward",
       .captures_again = 1},
      {.name = "ABackwardThatNeverComes",
       .hooks = forward_without_backward(),
       .reason = "the unit's weights are at other addresses",
       .captures_again = 1},
      {.name = "AnExceptionInTheForward",
       .hooks = before_step(
           5,
           [](Training& t) {
             nn::HookHandle hook = t.units().back()->add_forward_pre_hook(
                 [](nn::Module&, const nn::TensorList&) {
                   throw std::runtime_error("on purpose");
                 });
             EXPECT_THROW(t.forward(94, 0), std::exception);
           })},
      {.name = "AnExceptionInTheBackward",
       .hooks = exception_in_a_backward(),
       .reason = "the unit's weights are at other addresses",
       .captures_again = 1},
      {.name = "AHookInside",
       .hooks = hook_for_two_steps([](Training& t) {
         return inner_module(t).add_forward_hook(
             [](nn::Module&, const nn::TensorList&, const nn::TensorList&) {
               ++hook_calls();
             });
       }),
       .reason = "has forward hooks"},
      {.name = "AnOutputThatIsKept",
       .hooks = hook_for_two_steps(
           [](Training& t) {
             return t.units()[1]->add_forward_hook(
                 [](nn::Module&,
                    const nn::TensorList&,
                    const nn::TensorList& outputs) {
                   kept_tensors().push_back(outputs[0].detach());
                 });
           },
           [] { kept_tensors().clear(); }),
       .reason = "is still in use",
       .captures_again = 1},
      {.name = "AnUnshardOfTheProgram",
       .hooks = before_step(
           4,
           [](Training& t) {
             // More at once than the plan has room for.
             for (UnitId u = 1; u <= 5; ++u) {
               t.runtime().gathers().unshard(u);
             }
           }),
       .reason = "the unit's weights are at other addresses",
       .captures_again = 1},
      {.name = "ResetGraphs",
       .hooks = reset_of_the_graphs(),
       .captures_again = 1},
      {.name = "ResetOfTheRuntime", .hooks = reset_of_the_runtime()},
  };
}

class GraphDeviations : public ::testing::TestWithParam<Deviation> {};

TEST_P(GraphDeviations, B66_ChangesNoBit) {
  const Deviation& d = GetParam();
  GraphCase c{.mesh = {2}, .steps = 12, .max_delay_us = 50};
  c.graphs = false;
  const GraphRun eager = train_graphs(c, d.hooks);
  c.graphs = true;
  const GraphRun graphs = train_graphs(c, d.hooks);
  expect_same(eager, graphs);
  EXPECT_GT(graphs.stats.forward_replays, 3 * GraphCase::kLayers);
  EXPECT_EQ(
      graphs.stats.captures,
      2 * GraphCase::kLayers * (1 + d.captures_again));
  if (d.reason == nullptr) {
    EXPECT_THAT(graphs.stats.fallbacks, ::testing::IsEmpty());
  } else {
    EXPECT_THAT(
        graphs.stats.fallbacks,
        ::testing::Contains(::testing::Key(::testing::HasSubstr(d.reason))));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    GraphDeviations,
    ::testing::ValuesIn(deviations()),
    testing::kCaseName);

TEST(Graphs, B56_GradientsOfTwoCallsAddUp) {
  GraphCase c{.strategy = "zero2", .steps = 8};
  const GraphHooks two_calls{
      .before_backward = [](GraphTraining& t, int, at::Tensor& loss) {
        loss = loss + t.forward(91, 0);
      }};
  c.graphs = false;
  const GraphRun eager = train_graphs(c, two_calls);
  c.graphs = true;
  const GraphRun graphs = train_graphs(c, two_calls);
  expect_same(eager, graphs);
  EXPECT_GT(graphs.stats.forward_replays, 0);
  EXPECT_EQ(graphs.stats.backward_replays, 0);
}

TEST(Graphs, HooksOnUnitsRunEveryStep) {
  GraphCase c{.steps = 8};
  int calls = 0;
  std::vector<nn::HookHandle> handles;
  const GraphRun run = train_graphs(
      c,
      {.before_step = [&](GraphTraining& t, int step) {
        if (step == 0) {
          handles.push_back(t.units()[1]->add_forward_hook(
              [&](nn::Module&, const nn::TensorList&, const nn::TensorList&) {
                ++calls;
              }));
        }
      }});
  EXPECT_EQ(calls, c.steps);
  expect_replays(c, run);
}

// A forward depends on train() and eval(): a recording is made with the
// warm-up's modes, and a call with other modes is none of its replays.
TEST(Graphs, B55_ModesOfModulesAreThoseOfTheWarmUp) {
  testing::run_ranks(1, [](const testing::RankContext& context) {
    testing::FactorModel model(8, at::full({8}, 0.5), /*declared=*/true);
    const auto runtime = fully_shard(
        *model,
        context.mesh(),
        {.units = model->units(),
         .group = {.precision = Precision::full()},
         .runtime = {
             .graphs = {
                 .enabled = true,
                 .warmup_steps = 1,
                 .emulate_on_cpu = true}}});
    AdamW optimizer(runtime->groups(), {});
    auto& seen = testing::FactorBlockImpl::seen();
    seen.clear();
    for (int step = 0; step < 5; ++step) {
      {
        const c10::InferenceMode inference;
        model->eval();
        model(at::ones({2, 8}));
        model->train();
      }
      if (step == 1) {  // which captures
        model->units()[1]->eval();
      }
      model(at::ones({2, 8})).backward();
      optimizer.step(1e-3);
      optimizer.zero_grad();
    }
    // In gradient mode all ran as in training, but that one call.
    using Seen = testing::FactorBlockImpl::Seen;
    EXPECT_EQ(
        std::count_if(
            seen.begin(),
            seen.end(),
            [](const Seen& s) { return s.grad_mode && !s.training; }),
        1);
    EXPECT_EQ(
        std::count_if(
            seen.begin(),
            seen.end(),
            [](const Seen& s) { return !s.grad_mode && s.training; }),
        0);
    const GraphStats stats = runtime->graphs().stats();
    EXPECT_EQ(
        stats.fallbacks.at(
            "a module of the unit changed between train() and eval()"),
        1);
    EXPECT_EQ(
        stats.forward_replays,
        4 * testing::FactorModelImpl::kNumBlocks - 1);
  });
}

// A table that is replaced later: graphs have its address.
TEST(Graphs, ConstantsAreKeptForTheGraphs) {
  testing::run_ranks(1, [](const testing::RankContext& context) {
    at::Tensor factor = at::full({8}, 0.5);
    testing::FactorModel model(8, factor, /*declared=*/true);
    const auto runtime = fully_shard(
        *model,
        context.mesh(),
        {.units = model->units(),
         .group = {.precision = Precision::full()},
         .runtime = {
             .graphs = {
                 .enabled = true,
                 .warmup_steps = 1,
                 .emulate_on_cpu = true}}});
    AdamW optimizer(runtime->groups(), {});
    const c10::weak_intrusive_ptr<c10::StorageImpl> kept(
        factor.storage().getWeakStorageImpl());
    for (int step = 0; step < 4; ++step) {
      if (step == 3) {
        factor = at::full({8}, 0.5);
        model->set_factor(factor);
      }
      model(at::ones({2, 8})).backward();
      optimizer.step(1e-3);
      optimizer.zero_grad();
    }
    EXPECT_GT(runtime->graphs().stats().forward_replays, 0);
    EXPECT_FALSE(kept.expired());
  });
}

TEST(Graphs, AnOutputKeepsItsMemoryWhenTheGraphsAreReset) {
  at::Tensor memory = at::ones({4});
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(
      memory.storage().getWeakStorageImpl());
  at::Tensor output = hand_out(memory, nullptr).detach();
  memory.reset();
  EXPECT_FALSE(storage.expired());
  output.reset();
  EXPECT_TRUE(storage.expired());
}

TEST(Graphs, AMissCanBeAnError) {
  GraphCase c{.steps = 6, .miss_is_error = true};
  try {
    train_graphs(c, {.before_step = [](GraphTraining& t, int step) {
                   if (step == 4) {
                     t.forward(92, 0, /*batch=*/3);
                   }
                 }});
    FAIL() << "did not throw";
  } catch (const Error& e) {
    EXPECT_THAT(
        e.what(),
        ::testing::HasSubstr(
            "region block of unit model.layers.0 cannot be replayed as a CUDA "
            "graph: an input has another shape, layout or dtype"));
  }
}

TEST(Graphs, SecondDerivativesAreRefused) {
  GraphCase c{.strategy = "zero1", .steps = 6};
  try {
    train_graphs(
        c,
        {.before_backward = [](GraphTraining&, int step, at::Tensor& loss) {
          if (step == 4) {
            loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
          }
        }});
    FAIL() << "did not throw";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), ::testing::HasSubstr("create_graph"));
  } catch (const std::exception& e) {
    EXPECT_THAT(e.what(), ::testing::HasSubstr("create_graph"));
  }
}

TEST(Graphs, WhatTheyDoNotGoWithIsRefusedByName) {
  testing::run_ranks(1, [](const testing::RankContext& context) {
    const auto message = [&](RuntimeOptions runtime, bool offload = false) {
      runtime.graphs.enabled = true;
      nn::Linear model(4, 4);
      try {
        const auto sharded = fully_shard(
            *model,
            context.mesh(),
            {.units = {model.get()},
             .group = {.offload = offload},
             .runtime = runtime});
      } catch (const Error& e) {
        return e.message();
      }
      return std::string("did not throw");
    };
    EXPECT_THAT(
        message({}),
        ::testing::HasSubstr("requires a mesh of GPUs, got cpu"));
    EXPECT_THAT(
        message(
            {.graphs = {.regions = {"block", "attn"}, .emulate_on_cpu = true}}),
        ::testing::HasSubstr("either block or parts of blocks"));
    const GraphOptions on_cpu{.emulate_on_cpu = true};
    EXPECT_THAT(
        message({.slots_on_demand = true, .graphs = on_cpu}),
        ::testing::HasSubstr("slots_on_demand"));
    EXPECT_THAT(
        message({.debug = {.strict = true}, .graphs = on_cpu}),
        ::testing::HasSubstr("DebugOptions::strict"));
    EXPECT_THAT(
        message({.graphs = on_cpu}, /*offload=*/true),
        ::testing::HasSubstr("offload"));
    EXPECT_THAT(
        message({.graphs = {.warmup_steps = 0, .emulate_on_cpu = true}}),
        ::testing::HasSubstr("warmup_steps: expected at least 1, got 0"));
    EXPECT_THAT(
        message({.graphs = {.regions = {}, .emulate_on_cpu = true}}),
        ::testing::HasSubstr("GraphOptions::regions"));
  });
}

// Eager steps before a capture and after a resume round gradients as replays
// do.
TEST(Graphs, OfRegionsKeepGradientsInSlots) {
  for (const bool whole_step : {false, true}) {
    GraphTraining training({.whole_step = whole_step}, Mesh::single(at::kCPU));
    EXPECT_EQ(
        training.runtime().core().observers.need_gradient_slots(),
        !whole_step);
  }
}

// The full matrix on one rank: build/tests/graphs_test
// --gtest_also_run_disabled_tests --gtest_filter='*WholeMatrix*'
TEST(GraphMatrix, DISABLED_WholeMatrix) {
  for (GraphCase c : testing::all_graph_cases(1)) {
    SCOPED_TRACE(c.name());
    c.graphs = false;
    const GraphRun eager = train_graphs(c);
    c.graphs = true;
    const GraphRun graphs = train_graphs(c);
    expect_same(eager, graphs);
    expect_replays(c, graphs);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Pairwise,
    GraphParity,
    ::testing::ValuesIn(testing::pairwise_graph_cases()),
    testing::kCaseName);

}  // namespace
}  // namespace flatshard
