// A Llama with FP8 weights: N ranks against one, for any all-gathers.
#include "tests/runtime/float8_training.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

namespace flatshard::testing {
namespace {

using float8::Recipe;
using models::ActivationCheckpoint;
using ::testing::HasSubstr;

class Float8Formats : public ::testing::TestWithParam<Float8Format> {};
INSTANTIATE_TEST_SUITE_P(
    All,
    Float8Formats,
    ::testing::ValuesIn(float8_formats()),
    [](const auto& info) { return name_of_format(info.param); });

// A microbatch has the same shapes on either side, so its matmuls have the same
// kernels, and two gradients have one sum. Scales follow from maxima: those do
// not depend on the order.
TEST_P(Float8Formats, TwoRanksAreBitwiseOneWithTwoMicrobatches) {
  const Float8Run one = train_float8({.format = GetParam(), .microbatches = 2});
  const Float8Run two =
      train_float8({.format = GetParam(), .mesh = {2}, .max_delay_us = 300});
  expect_same_run(two, one);
  EXPECT_LT(one.losses.at({2, 0}), one.losses.at({0, 0}));
  // It is FP8, and near to bfloat16: matmuls are off by 2^-4 / sqrt(k) or so,
  // of logits that are small at first.
  static const Float8Run bf16 = train_float8({.microbatches = 2});
  EXPECT_NE(one.losses.at({0, 0}), bf16.losses.at({0, 0}));
  for (const auto& [at, loss] : bf16.losses) {
    EXPECT_NEAR(one.losses.at(at), loss, 0.05) << at.first;
  }
}

// LoRA's base is such a case.
TEST_P(Float8Formats, FrozenWeightsAreGatheredToo) {
  Float8Case c{
      .format = GetParam(),
      .microbatches = 2,
      .steps = 2,
      .freezes_attention = true};
  const Float8Run one = train_float8(c);
  c.microbatches = 1;
  c.mesh = {2};
  expect_same_run(train_float8(c), one);
}

TEST(Float8Training, EveryStrategyComputesTheSame) {
  const Float8Format format{.recipe = Recipe::rowwise, .stored_columns = true};
  const Float8Run one = train_float8({.format = format, .microbatches = 2});
  for (const char* strategy : {"zero0", "zero1", "zero2"}) {
    SCOPED_TRACE(strategy);
    expect_same_run(
        train_float8({.format = format, .strategy = strategy, .mesh = {2}}),
        one);
    expect_same_run(
        train_float8(
            {.format = Float8Format{.recipe = Recipe::tensorwise},
             .strategy = strategy,
             .mesh = {2}}),
        train_float8(
            {.format = Float8Format{.recipe = Recipe::tensorwise},
             .microbatches = 2}));
  }
  const Float8Run four = train_float8({.format = format, .microbatches = 4});
  for (const char* strategy : {"hsdp", "hfsdp"}) {
    SCOPED_TRACE(strategy);
    const Float8Run run =
        train_float8({.format = format, .strategy = strategy, .mesh = {2, 2}});
    for (const auto& [at, loss] : four.losses) {
      // Four gradients are summed in another order.
      EXPECT_NEAR(run.losses.at(at), loss, at.first == 0 ? 0 : 2e-2);
    }
  }
}

// The time of all-gathers changes no bit.
class Float8Columns : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(DerivedAndStored, Float8Columns, ::testing::Bool());

TEST_P(Float8Columns, PartsKeepingOffloadAndPoisonChangeNothing) {
  Float8Case plain{
      .format =
          Float8Format{.recipe = Recipe::rowwise, .stored_columns = GetParam()},
      .mesh = {2}};
  const Float8Run want = train_float8(plain);
  plain.max_delay_us = 200;
  const auto check = [&](const std::function<void(Float8Case&)>& change) {
    Float8Case c = plain;
    change(c);
    expect_same_run(train_float8(c), want);
  };
  for (const GatherParts parts :
       {GatherParts::unit, GatherParts::recomputed, GatherParts::module}) {
    check([&](Float8Case& c) {
      c.gather_parts = parts;
      c.checkpoint = ActivationCheckpoint::selective;
    });
  }
  check([](Float8Case& c) { c.gather_parts = GatherParts::module; });
  check([](Float8Case& c) { c.checkpoint = ActivationCheckpoint::full; });
  check([](Float8Case& c) { c.reshard_after_forward = false; });
  check([](Float8Case& c) { c.offload = true; });
  check([](Float8Case& c) {
    c.checkpoint = ActivationCheckpoint::selective;
    c.poison = true;
  });
}

// Planes of a unit with FP8 weights.
constexpr PlaneId kRowPlane = kComputePlane + 1;
constexpr PlaneId kColumnPlane = kRowPlane + 1;

std::int64_t gathered(const Float8Run& run, Phase phase, PlaneId plane) {
  std::vector<Action> actions = run.last_step;
  std::erase_if(actions, [&](const Action& a) {
    return a.kind != ActionKind::gather || a.phase != phase || a.plane != plane;
  });
  return gathered_nbytes(run.units, actions);
}

TEST(Float8Training, F3_ASelectiveRecomputeGathersItsRowsAndNoMore) {
  const Float8Format format{.recipe = Recipe::rowwise, .stored_columns = true};
  const auto run = [&](ActivationCheckpoint checkpoint,
                       GatherParts parts = GatherParts::recomputed,
                       int steps = 2) {
    return train_float8(
        {.format = format,
         .mesh = {2},
         .steps = steps,
         .gather_parts = parts,
         .checkpoint = checkpoint,
         .prefetches_between_steps = false});
  };
  constexpr std::int64_t kAttention = 4 * Float8Case::kDim * Float8Case::kDim;
  constexpr std::int64_t kMlp = 3 * Float8Case::kDim * Float8Case::kFfn;
  const Float8Run none = run(ActivationCheckpoint::none);
  EXPECT_EQ(
      gathered(none, Phase::forward, kRowPlane),
      Float8Case::kLayers * (kAttention + kMlp));
  EXPECT_EQ(gathered(none, Phase::forward, kColumnPlane), 0);
  EXPECT_EQ(gathered(none, Phase::backward, kRowPlane), 0);
  EXPECT_EQ(
      gathered(none, Phase::backward, kColumnPlane),
      Float8Case::kLayers * (kAttention + kMlp));
  // Nothing reads the result of the down projection, so it has no matmul.
  const Float8Run some = run(ActivationCheckpoint::selective);
  EXPECT_EQ(
      gathered(some, Phase::backward, kRowPlane),
      Float8Case::kLayers * kMlp * 2 / 3);
  EXPECT_EQ(
      gathered(some, Phase::backward, kColumnPlane),
      Float8Case::kLayers * (kAttention + kMlp));
  // The first step taught that: they come while the next unit computes.
  const auto rows = std::ranges::find_if(some.last_step, [&](const Action& a) {
    return a.kind == ActionKind::gather && a.phase == Phase::backward &&
           a.plane == kRowPlane && some.units[a.unit].name == "model.layers.0";
  });
  const auto behind = std::ranges::find_if(some.last_step, [&](const auto& a) {
    return a.kind == ActionKind::await && a.plane == kColumnPlane &&
           some.units[a.unit].name == "model.layers.1";
  });
  EXPECT_LT(rows, behind);
  // Off is off, from the first step on.
  for (const int steps : {1, 2}) {
    const Float8Run whole =
        run(ActivationCheckpoint::selective, GatherParts::unit, steps);
    EXPECT_EQ(
        gathered(whole, Phase::backward, kRowPlane),
        Float8Case::kLayers * (kAttention + kMlp));
  }
}

// On one rank rows are stored. Each backward derives columns from them and
// frees them at its end.
TEST(Float8Training, RestingRowsAreTransposedForEachBackward) {
  for (const auto& [strategy, ranks] :
       {std::pair{"zero3", 1}, std::pair{"zero2", 2}}) {
    const Float8Run run = train_float8(
        {.format = Float8Format{.recipe = Recipe::tensorwise},
         .strategy = strategy,
         .mesh = {ranks},
         .prefetches_between_steps = false});
    std::map<std::pair<ActionKind, PlaneId>, int> count;
    for (const Action& a : run.last_step) {
      ++count[{a.kind, a.plane}];
    }
    EXPECT_EQ((count[{ActionKind::derive, kColumnPlane}]), Float8Case::kLayers);
    EXPECT_EQ(
        (count[{ActionKind::release, kColumnPlane}]),
        Float8Case::kLayers);
    EXPECT_EQ((count[{ActionKind::release, kRowPlane}]), 0);
  }
}

TEST(Float8Training, AStrayReadNamesTheParameter) {
  run_ranks(1, [](RankContext& context) {
    models::Llama llama = make_llama(ActivationCheckpoint::none);
    const auto runtime = shard_llama(
        llama,
        context.mesh(),
        {.format = Float8Format{.recipe = Recipe::mxfp8}});
    at::Tensor weight;
    for (const auto& p : nn::named_parameters(*llama)) {
      if (p.name == "model.layers.1.mlp.up_proj.weight") {
        weight = p.tensor;
      }
    }
    ASSERT_TRUE(weight.defined());
    EXPECT_EQ(weight.scalar_type(), at::kBFloat16);
    for (const bool computes : {false, true}) {
      if (computes) {
        runtime->gathers().unshard(2);
      }
      std::string message;
      try {
        weight.sum();
      } catch (const std::exception& e) {
        message = e.what();
      }
      EXPECT_THAT(
          message,
          HasSubstr("parameter model.layers.1.mlp.up_proj.weight of unit "
                    "model.layers.1 is stored in FP8"));
    }
    runtime->gathers().reshard(2);
  });
}

TEST(Float8Training, TheHeadAndWhatIsNotALinearStayBfloat16) {
  run_ranks(1, [](RankContext& context) {
    models::Llama llama = make_llama(ActivationCheckpoint::none);
    const auto runtime = shard_llama(
        llama,
        context.mesh(),
        {.format = Float8Format{.recipe = Recipe::tensorwise}});
    int num_fp8 = 0;
    for (ParamGroup* group : runtime->all_groups()) {
      for (const GroupParameter& p : group->parameters()) {
        const bool is_fp8 = !group->weights().has(kComputePlane);
        num_fp8 += is_fp8;
        EXPECT_EQ(
            is_fp8,
            p.names.front().find("_proj.weight") != std::string::npos)
            << p.names.front();
      }
    }
    EXPECT_EQ(num_fp8, 7 * Float8Case::kLayers);
  });
}

}  // namespace
}  // namespace flatshard::testing
