// Mistakes that sharded runtimes are known to have made
// (docs/dev/regressions.md), in what an optimizer does to flat shards.
#include "flatshard/optim/adamw.h"
#include "tests/optim/one_group.h"

#include <gtest/gtest.h>

namespace flatshard::testing {
namespace {

std::unique_ptr<ParamGroup> few_whole_tensors(std::shared_ptr<Mesh> mesh) {
  std::vector<GroupParameter> parameters;
  for (int i = 0; i < 3; ++i) {
    GroupParameter p{
        .names = {"p" + std::to_string(i)},
        .shape = {5 + 8 * i},
        .placement = {.granularity = Granularity::tensor()},
        .init = InitSpec::normal(0, 1)};
    if (i == 1) {
      p.attributes = {{"weight_decay", "none"}};
    }
    parameters.push_back(std::move(p));
  }
  return std::make_unique<ParamGroup>(
      GroupSpec{
          .name = "few",
          .parameters = std::move(parameters),
          .mesh = std::move(mesh),
          .strategy = Strategy::named("zero3", 1)},
      ParamGroupOptions{.precision = Precision::full()},
      Initializer(5));
}

void three_steps(ParamGroup& group) {
  AdamW adamw({&group}, {.weight_decay = 0.3});
  for (int step = 0; step < 3; ++step) {
    at::Tensor flat = at::zeros({group.layout().numel()});
    for (std::int64_t i = 0; i < 3; ++i) {
      const std::int64_t n = group.layout().tensor_numel(i);
      flat.narrow(0, group.layout().tensor_offset(i), n)
          .copy_(at::arange(n, at::kFloat) - 3);
    }
    reduce(group, flat);
    adamw.step(0.1);
    adamw.zero_grad();
  }
}

TEST(Pitfalls, B1_RanksWithoutAPieceOfAParameter) {
  const auto whole = few_whole_tensors(Mesh::single(at::kCPU));
  three_steps(*whole);
  std::map<std::string, at::Tensor> expected;
  for (const NamedShard& shard : whole->main_shards()) {
    expected[shard.name()] = shard.tensor;
  }
  run_ranks(5, [&](RankContext& context) {
    const auto group = few_whole_tensors(context.mesh());
    three_steps(*group);
    for (const NamedShard& shard : group->main_shards()) {
      EXPECT_TRUE(
          shard.tensor.equal(expected.at(shard.name())
                                 .narrow(0, shard.begin, shard.tensor.numel())))
          << shard.name() << " on rank " << context.rank;
    }
  });
}

TEST(Pitfalls, B3_TheStateHoldsNoCopyOfTheWeights) {
  for (const at::ScalarType main_params : {at::kFloat, at::kBFloat16}) {
    const auto group = make_group(
        Mesh::single(at::kCPU),
        "zero3",
        {.compute = at::kBFloat16, .main_params = main_params});
    AdamW adamw({group.get()}, {.weight_decay = 0});
    std::vector<std::string> names;
    for (const auto& [name, state] : adamw.state(0)) {
      names.push_back(name);
    }
    EXPECT_EQ(names, (std::vector<std::string>{"exp_avg", "exp_avg_sq"}));
    for (const double start : {8.0, -2.0}) {
      // A hidden copy would write its own values back.
      at::Tensor(group->weights().main().local()).fill_(start);
      reduce(*group, whole_gradient(*group, at::ones({40}), at::ones({25})));
      adamw.step(1.0);
      EXPECT_LT(
          (group->main_shards()[0].tensor.to(at::kFloat) - (start - 1))
              .abs()
              .max()
              .item<double>(),
          0.1);
      adamw.zero_grad();
    }
  }
}

TEST(Pitfalls, R14_MakingTheStateIsNotAStep) {
  const auto group = make_group(Mesh::single(at::kCPU));
  const auto fresh = make_group(Mesh::single(at::kCPU));
  const std::int64_t generation = group->weights().version();
  AdamW adamw({group.get()}, {});
  for (const auto& [name, state] : adamw.state(0)) {
    EXPECT_EQ(state.numel(), group->weights().main().local().numel());
    EXPECT_EQ(state.abs().sum().item<double>(), 0) << name;
  }
  EXPECT_EQ(adamw.num_steps(), 0);
  EXPECT_EQ(group->weights().version(), generation);
  EXPECT_TRUE(
      group->weights().main().local().equal(fresh->weights().main().local()));
  // The first step equals the step of an optimizer that never stepped.
  reduce(*group, whole_gradient(*group, at::ones({40}), at::ones({25})));
  adamw.step(0.01);
  const at::Tensor bias = group->main_shards()[1].tensor;
  EXPECT_TRUE(
      at::allclose(bias, fresh->main_shards()[1].tensor - 0.01, 1e-5, 1e-6));
}

}  // namespace
}  // namespace flatshard::testing
