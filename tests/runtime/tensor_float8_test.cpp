// FP8 weights of layers that ranks share: each rank quantizes its own part.
#include "tests/runtime/tensor_training.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

namespace flatshard::testing {
namespace {

using float8::Recipe;
using models::ActivationCheckpoint;

// Returns the updates of a step, by parameter.
std::map<std::string, at::Tensor> updates_of(TensorRun run) {
  run.steps = 1;
  const TensorResult after = train_tensor(run);
  run = tensor_reference(run);
  run.steps = 0;
  const TensorResult before = train_tensor(run);
  std::map<std::string, at::Tensor> updates;
  for (const auto& [name, values] : after.weights) {
    updates[name] = at::tensor(values) - at::tensor(before.weights.at(name));
  }
  return updates;
}

struct Deviation {
  double largest = 0;  ///< of a parameter's update, relative to that
  std::string where;
};

Deviation deviation(
    const std::map<std::string, at::Tensor>& got,
    const std::map<std::string, at::Tensor>& want) {
  Deviation found;
  EXPECT_EQ(got.size(), want.size());
  for (const auto& [name, update] : want) {
    const double relative =
        ((got.at(name) - update).norm() / update.norm()).item<double>();
    if (!(relative <= found.largest)) {
      found = {relative, name};
    }
  }
  return found;
}

TensorRun with_float8(Float8Format format, TensorRun run) {
  run.model = "wide";
  run.precision = Precision();
  run.float8 = format;
  return run;
}

std::vector<TensorRun> float8_runs() {
  const Float8Format mxfp8{.recipe = Recipe::mxfp8};
  const Float8Format rowwise{.recipe = Recipe::rowwise};
  const Float8Format rowwise_stored{
      .recipe = Recipe::rowwise,
      .stored_columns = true};
  std::vector<TensorRun> runs{
      with_float8(mxfp8, {.strategy = "hfsdp", .replicate = 2, .tp = 2}),
      with_float8(mxfp8, {.dp = 2, .tp = 4}),
      with_float8(
          {.recipe = Recipe::mxfp8, .stored_columns = true},
          {.dp = 2, .tp = 2, .checkpoint = ActivationCheckpoint::full}),
      with_float8(
          rowwise,
          {.dp = 2, .tp = 2, .checkpoint = ActivationCheckpoint::full}),
      with_float8(rowwise_stored, {.strategy = "zero2", .dp = 2, .tp = 2}),
      with_float8(rowwise, {.dp = 2, .tp = 2, .copies = true}),
      with_float8(
          {.recipe = Recipe::blockwise},
          {.dp = 2,
           .tp = 2,
           .microbatches = 2,
           .checkpoint = ActivationCheckpoint::selective}),
      with_float8(
          {.recipe = Recipe::tensorwise},
          {.strategy = "zero1", .dp = 2, .tp = 2}),
      // Ranks quantize their own tokens.
      with_float8(
          rowwise,
          {.dp = 2, .cp = 2, .checkpoint = ActivationCheckpoint::full}),
      with_float8(
          {.recipe = Recipe::tensorwise},
          {.strategy = "zero1", .dp = 2, .cp = 2}),
      with_float8(mxfp8, {.cp = 2, .tp = 2, .microbatches = 2})};
  // Main weights of another dtype.
  TensorRun narrow = runs.front();
  narrow.precision.main_params = at::kBFloat16;
  runs.push_back(narrow);
  return runs;
}

class TensorParallelFloat8 : public ::testing::TestWithParam<TensorRun> {};

INSTANTIATE_TEST_SUITE_P(
    Recipes,
    TensorParallelFloat8,
    ::testing::ValuesIn(float8_runs()),
    [](const auto& info) {
      const TensorRun& run = info.param;
      return std::string(float8::to_string(run.float8->recipe)) +
             (run.float8->stored_columns ? "_stored_" : "_") + run.name() +
             "_" + std::to_string(info.index);
    });

// The parts of a row or of a tensor have other scales than all of it. So the
// ranks are about as far from one rank as FP8 is from bfloat16.
TEST_P(TensorParallelFloat8, IsNearOneRankWithFloat8) {
  TensorRun run = GetParam();
  const auto got = updates_of(run);
  const auto want = updates_of(tensor_reference(run));
  run.float8.reset();
  const auto without = updates_of(tensor_reference(run));
  const Deviation of_ranks = deviation(got, want);
  const Deviation of_float8 = deviation(want, without);
  EXPECT_GT(of_float8.largest, 0.05) << "nothing was FP8";
  EXPECT_LE(of_ranks.largest, 2 * of_float8.largest) << of_ranks.where;
}

// Planes of parts are all-gathered like planes of full weights: ranks that read
// different samples equal one that reads them one after the other. Gradients of
// weights that are not split are sums of four addends, in another order.
TEST_P(TensorParallelFloat8, DataRanksHaveTheBitsOfMicrobatches) {
  TensorRun run = GetParam();
  if (run.data_ranks() != 2 || run.cp > 1) {
    GTEST_SKIP() << "the sums of two addends alone have one order";
  }
  run.steps = 1;
  run.microbatches = 1;
  TensorRun one = run;
  one.strategy = "zero3";
  one.replicate = one.dp = 1;
  one.microbatches = 2;
  const TensorResult got = train_tensor(run);
  const TensorResult want = train_tensor(one);
  EXPECT_EQ(got.losses, want.losses);
  ASSERT_EQ(got.weights.size(), want.weights.size());
  for (const auto& [name, values] : want.weights) {
    if (name.find("norm") == std::string::npos) {
      EXPECT_EQ(got.weights.at(name), values) << name;
    }
  }
}

}  // namespace
}  // namespace flatshard::testing
