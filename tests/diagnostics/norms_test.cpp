#include "flatshard/diagnostics/norms.h"

#include "flatshard/optim/sgd.h"
#include "tests/runtime/training.h"
#include "tests/support/sum_order.h"

#include <ATen/ATen.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

namespace flatshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kDim = 24;

/// Returns how far a norm may be, relative to it: gradients are sums over ranks
/// and microbatches, and a norm is the root of a sum of squares.
double norm_tolerance() {
  return testing::sum_tolerance({.addends = kDim * kDim, .in_a_row = 2});
}

struct NormsCase {
  std::string strategy;
  std::vector<MeshAxis> axes;
  int microbatches = 1;
};

int world_of(const NormsCase& c) {
  int world = 1;
  for (const MeshAxis& axis : c.axes) {
    world *= static_cast<int>(axis.size);
  }
  return world;
}

// Every rank has the same batch, so the mean equals the result of one rank.
std::vector<ParameterNorm> norms_of(const NormsCase& c, std::size_t* launches) {
  std::vector<ParameterNorm> result;
  std::mutex mutex;
  run_ranks(world_of(c), [&](RankContext& context) {
    ToyModel model(kDim, 3, true);
    const auto runtime = fully_shard(
        *model,
        context.mesh(c.axes),
        {.units = model->unit_modules(),
         .strategy = c.strategy,
         .group = {.precision = Precision::full()}});
    const at::Tensor x = at::linspace(-1, 1, 4 * kDim).view({4, kDim});
    for (int m = 0; m < c.microbatches; ++m) {
      runtime->set_is_last_microbatch(m == c.microbatches - 1);
      (model(x, at::zeros({4, kDim})) / c.microbatches).backward();
    }
    context.log->clear();
    auto norms = parameter_norms(*runtime);
    const std::lock_guard lock(mutex);
    if (launches != nullptr) {
      *launches = context.log->records().size();
    }
    if (!result.empty()) {
      EXPECT_EQ(result.size(), norms.size());
      for (std::size_t i = 0; i < norms.size(); ++i) {
        EXPECT_EQ(result[i].weight, norms[i].weight);
        EXPECT_EQ(result[i].grad, norms[i].grad);
      }
    }
    result = std::move(norms);
  });
  return result;
}

TEST(Norms, AreThoseOfOneRankOnEveryMesh) {
  const auto whole = norms_of({"zero3", {{"dp", 1}}}, nullptr);
  ASSERT_GT(whole.size(), 8U);
  for (const NormsCase& c : std::vector<NormsCase>{
           {"zero0", {{"dp", 2}}},
           {"zero1", {{"dp", 2}}},
           {"zero2", {{"dp", 3}}},
           {"zero3", {{"dp", 2}}},
           {"zero3", {{"dp", 5}}},
           {"zero3", {{"dp", 2}}, 2},
           {"hsdp", {{"outer", 2}, {"dp", 2}}},
           {"hfsdp", {{"outer", 2}, {"dp", 2}}, 2},
           {"hsdp_zero1", {{"outer", 2}, {"dp", 2}}}}) {
    SCOPED_TRACE(c.strategy + " " + std::to_string(world_of(c)));
    std::size_t launches = 0;
    const auto norms = norms_of(c, &launches);
    EXPECT_EQ(launches, 1U) << "one all-reduce serves all parameters";
    ASSERT_EQ(norms.size(), whole.size());
    for (std::size_t i = 0; i < norms.size(); ++i) {
      EXPECT_EQ(norms[i].name, whole[i].name);
      EXPECT_NEAR(
          norms[i].weight,
          whole[i].weight,
          norm_tolerance() * whole[i].weight)
          << norms[i].name;
      ASSERT_TRUE(norms[i].grad && whole[i].grad);
      EXPECT_NEAR(
          *norms[i].grad,
          *whole[i].grad,
          norm_tolerance() * *whole[i].grad + 1e-7)
          << norms[i].name;
    }
  }
}

TEST(Norms, AreThoseOfTheTensors) {
  ToyModel model(kDim, 1, true);
  const auto runtime = fully_shard(
      *model,
      Mesh::single(at::kCPU),
      {.units = model->unit_modules(),
       .group = {.precision = Precision::full()}});
  for (const ParameterNorm& norm : parameter_norms(*runtime)) {
    EXPECT_FALSE(norm.grad) << norm.name << " has no gradient yet";
  }
  model(at::ones({4, kDim}), at::zeros({4, kDim})).backward();
  const auto norms = parameter_norms(*runtime);
  std::map<std::string, std::pair<double, double>> expected;
  for (ParamGroup* group : runtime->groups()) {
    const auto grads = group->shards_of(group->gradients().reduced().local());
    const auto weights = group->main_shards();
    for (std::size_t i = 0; i < grads.size(); ++i) {
      expected[grads[i].name()] = {
          weights[i].tensor.norm().item<double>(),
          grads[i].tensor.norm().item<double>()};
    }
  }
  ASSERT_EQ(norms.size(), expected.size());
  for (const ParameterNorm& norm : norms) {
    const auto [weight, grad] = expected.at(norm.name);
    EXPECT_NEAR(norm.weight, weight, norm_tolerance() * weight) << norm.name;
    EXPECT_NEAR(*norm.grad, grad, norm_tolerance() * grad) << norm.name;
  }
}

TEST(Norms, Text) {
  const std::string text = to_string(std::vector<ParameterNorm>{
      {"layers.0.weight", 2.0, 0.5},
      {"frozen", 3.0, std::nullopt}});
  EXPECT_THAT(
      text,
      AllOf(
          HasSubstr("parameter             weight         grad  grad/weight\n"),
          HasSubstr("layers.0.weight   2.0000e+00   5.0000e-01   2.5000e-01\n"),
          HasSubstr("frozen            3.0000e+00            -            -")));
}

}  // namespace
}  // namespace flatshard::testing
