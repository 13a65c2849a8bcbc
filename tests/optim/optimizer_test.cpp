#include "flatshard/optim/optimizer.h"

#include "flatshard/core/error.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/optim/sgd.h"
#include "tests/optim/one_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard::testing {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<Mesh> one_rank() {
  return Mesh::single(at::kCPU);
}

at::Tensor weight(const ParamGroup& group) {
  return group.main_shards()[0].tensor;
}
at::Tensor bias(const ParamGroup& group) {
  return group.main_shards()[1].tensor;
}

void reduce_constant(ParamGroup& group, double value) {
  reduce(
      group,
      whole_gradient(group, at::full({40}, value), at::full({25}, value)));
}

template <class Call>
std::string message(ErrorCode code, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.message();
  }
  ADD_FAILURE() << "expected an error";
  return {};
}

TEST(Optimizer, DecaysOnlyWhereItShould) {
  const auto group = make_group(one_rank());
  const at::Tensor w = weight(*group).clone();
  const at::Tensor b = bias(*group).clone();
  Sgd sgd({group.get()}, {.weight_decay = 0.5});
  reduce_constant(*group, 0);
  sgd.step(0.25);
  EXPECT_TRUE(weight(*group).equal(w * (1 - 0.125)));
  EXPECT_TRUE(bias(*group).equal(b));
  EXPECT_EQ(sgd.num_steps(), 1);
}

TEST(Optimizer, WeightDecayMayChangeBetweenSteps) {
  const auto group = make_group(one_rank());
  Sgd sgd({group.get()}, {.weight_decay = 0.5});
  const auto expect = [&](double of_weight, double of_bias) {
    for (std::size_t i = 0; i < 2; ++i) {
      ParameterValues values = sgd.parameter_groups().groups[i].values;
      values.weight_decay = i == 0 ? of_weight : of_bias;
      sgd.set_values(i, values);
    }
    const at::Tensor w = weight(*group).clone();
    const at::Tensor b = bias(*group).clone();
    reduce_constant(*group, 0);
    sgd.step(0.25);
    sgd.zero_grad();
    EXPECT_TRUE(weight(*group).equal(w * (1 - 0.25 * of_weight)));
    EXPECT_TRUE(bias(*group).equal(b * (1 - 0.25 * of_bias)));
  };
  expect(0, 2);
  expect(1, 1);
  expect(0.5, 0);
  EXPECT_THAT(
      message(
          ErrorCode::config,
          [&] {
            sgd.set_values(
                0,
                {.algorithm = Algorithm::sgd, .weight_decay = -1});
          }),
      HasSubstr("weight_decay >= 0, got -1"));
  for (const ParameterValues& values :
       {ParameterValues{.algorithm = Algorithm::adamw},
        ParameterValues{.algorithm = Algorithm::sgd, .momentum = 0.5}}) {
    EXPECT_THAT(
        message(ErrorCode::usage, [&] { sgd.set_values(0, values); }),
        HasSubstr("parameter group the rest"));
  }
}

TEST(Optimizer, CoefficientsMayChangeBetweenSteps) {
  const auto group = make_group(one_rank());
  AdamW adamw({group.get()}, {.weight_decay = 0});
  // The sign of each gradient.
  for (const std::size_t i : {0, 1}) {
    adamw.set_values(i, {.beta1 = 0, .beta2 = 0});
  }
  for (const double gradient : {-3.0, 2.0}) {
    const at::Tensor w = weight(*group).clone();
    reduce_constant(*group, gradient);
    adamw.step(0.01);
    adamw.zero_grad();
    const double sign = gradient < 0 ? -1 : 1;
    EXPECT_TRUE(at::allclose(weight(*group), w - 0.01 * sign, 1e-6, 1e-6));
  }
  EXPECT_THAT(
      message(ErrorCode::config, [&] { adamw.set_values(0, {.beta1 = 1}); }),
      HasSubstr("beta1"));
}

ParameterRules rules_of(ParameterValues rest, ParameterRule rule) {
  return {.rest = rest, .rules = {std::move(rule)}};
}

// Every value of a rule acts on its parameters and on no other.
TEST(Optimizer, EachParameterGroupHasItsOwnValues) {
  const ParameterValues rest{
      .weight_decay = 0.1,
      .beta1 = 0.8,
      .beta2 = 0.9,
      .eps = 1e-6};
  const at::Tensor w = at::arange(40, at::kFloat) / 64;
  const at::Tensor b = at::arange(25, at::kFloat) / -32;
  // Returns weight and bias after three steps.
  const auto trained = [&](const ParameterRules& rules, double lr) {
    const auto group = make_group(one_rank());
    Optimizer optimizer({group.get()}, rules);
    for (int step = 0; step < 3; ++step) {
      reduce(*group, whole_gradient(*group, w, b));
      optimizer.step(lr);
      optimizer.zero_grad();
    }
    return std::pair(weight(*group).clone(), bias(*group).clone());
  };
  const auto [rest_weight, rest_bias] = trained({.rest = rest}, 0.1);
  for (const ParameterRule& rule :
       {ParameterRule{.pattern = "weight", .lr_mult = 0.5},
        ParameterRule{.pattern = "weight", .wd_mult = 3},
        ParameterRule{.pattern = "weight", .beta1 = 0.5},
        ParameterRule{.pattern = "weight", .beta2 = 0.5},
        ParameterRule{.pattern = "weight", .eps = 0.1},
        ParameterRule{.pattern = "weight", .algorithm = Algorithm::sgd},
        ParameterRule{
            .pattern = "weight",
           .algorithm = Algorithm::sgd,
           .momentum = 0.9}}) {
    const auto [own_weight, own_bias] = trained(rules_of(rest, rule), 0.1);
    EXPECT_TRUE(own_bias.equal(rest_bias));
    EXPECT_FALSE(own_weight.equal(rest_weight));
    const auto [want, unused] = trained(
        {.rest =
             {.algorithm = rule.algorithm.value_or(rest.algorithm),
              .weight_decay = rest.weight_decay * rule.wd_mult,
              .beta1 = rule.beta1.value_or(rest.beta1),
              .beta2 = rule.beta2.value_or(rest.beta2),
              .eps = rule.eps.value_or(rest.eps),
              .momentum = rule.momentum.value_or(rest.momentum)}},
        0.1 * rule.lr_mult);
    EXPECT_TRUE(own_weight.equal(want));
  }
}

// A state belongs to the parameters of its algorithm.
TEST(Optimizer, StatesOfTwoAlgorithmsInOneGroup) {
  const auto group = make_group(one_rank());
  Optimizer optimizer(
      {group.get()},
      rules_of(
          {},
          {.pattern = "bias", .algorithm = Algorithm::sgd, .momentum = 0.5}));
  std::map<std::string, std::vector<std::string>> names;
  for (const auto& [state, shards] : optimizer.state_shards(0)) {
    for (const NamedShard& shard : shards) {
      names[state].push_back(shard.name());
    }
  }
  EXPECT_EQ(
      names,
      (std::map<std::string, std::vector<std::string>>{
          {"exp_avg", {"weight"}},
          {"exp_avg_sq", {"weight"}},
          {"momentum", {"bias"}}}));
}

TEST(Optimizer, WritesComputeWeightsAndSaysSo) {
  const auto group = make_group(one_rank());
  AdamW adamw({group.get()}, {});
  const std::int64_t generation = group->weights().version();
  reduce_constant(*group, 1);
  adamw.step(0.1);
  EXPECT_TRUE(group->weights().compute_shard().equal(
      group->weights().main().local().to(at::kBFloat16)));
  EXPECT_GT(group->weights().version(), generation);
  // The optimizer's own write does not count as a foreign write.
  EXPECT_FALSE(group->weights().adopt_foreign_writes());
}

TEST(Optimizer, B13_TheFirstAdamWStepIsTheSign) {
  const auto group = make_group(one_rank());
  const at::Tensor w = weight(*group).clone();
  AdamW adamw({group.get()}, {.weight_decay = 0});
  reduce_constant(*group, -3);
  adamw.step(0.01);
  EXPECT_TRUE(at::allclose(weight(*group), w + 0.01, 1e-6, 1e-6));
}

TEST(Optimizer, GroupsWithoutGradientAreLeftAlone) {
  const auto used = make_group(one_rank());
  const auto idle = make_group(one_rank());
  const at::Tensor before = idle->weights().main().local().clone();
  AdamW adamw({used.get(), idle.get()}, {});
  for (int step = 0; step < 3; ++step) {
    reduce_constant(*used, 1);
    adamw.step(0.1);
    adamw.zero_grad();
  }
  EXPECT_TRUE(idle->weights().main().local().equal(before));
  for (const auto& [name, state] : adamw.state(1)) {
    EXPECT_EQ(state.abs().sum().item<double>(), 0) << name;
  }
  // Its bias correction starts with its own first step.
  reduce_constant(*idle, 1);
  const at::Tensor b = bias(*idle).clone();
  adamw.step(0.01);
  EXPECT_TRUE(at::allclose(bias(*idle), b - 0.01, 1e-5, 1e-6));
}

// The other parameters of their group have gradients.
TEST(Optimizer, ParametersWithoutGradientAreLeftAlone) {
  const std::vector<ParameterRules> all_rules = {
      {.rest = {.weight_decay = 0.1}},
      {.rest =
           {.algorithm = Algorithm::sgd, .weight_decay = 0.1, .momentum = 0.9}},
      rules_of(
          {.weight_decay = 0.1},
          {.pattern = "bias", .algorithm = Algorithm::sgd, .momentum = 0.5}),
      rules_of({.weight_decay = 0.1}, {.pattern = "bias", .wd_mult = 2})};
  const at::Tensor w = at::arange(40, at::kFloat) / 64;
  const at::Tensor b = at::arange(25, at::kFloat) / -32;
  for (const ParameterRules& rules : all_rules) {
    const auto reference = [&](int steps) {
      auto group = make_group(one_rank());
      Optimizer optimizer({group.get()}, rules);
      for (int step = 0; step < steps; ++step) {
        reduce(*group, whole_gradient(*group, w, b));
        optimizer.step(0.1);
        optimizer.zero_grad();
      }
      return group;
    };
    const auto group = make_group(one_rank());
    Optimizer optimizer({group.get()}, rules);
    const auto step = [&](std::vector<bool> without) {
      reduce(*group, whole_gradient(*group, w, b));
      optimizer.step(0.1, {}, {std::move(without)});
      optimizer.zero_grad();
    };
    const auto expect_steps = [&](int of_weight, int of_bias) {
      EXPECT_TRUE(weight(*group).equal(weight(*reference(of_weight))));
      EXPECT_TRUE(bias(*group).equal(bias(*reference(of_bias))));
      EXPECT_TRUE(group->weights().compute_shard().equal(
          group->weights().main().local().to(at::kBFloat16)));
      EXPECT_EQ(optimizer.num_updates(0, 0), of_weight);
      EXPECT_EQ(optimizer.num_updates(0, 1), of_bias);
    };
    step({});
    expect_steps(1, 1);
    step({false, true});
    expect_steps(2, 1);
    step({false, false});  // two rows of one parameter group
    expect_steps(3, 2);
    step({true, false});
    expect_steps(3, 3);
    step({});
    expect_steps(4, 4);
    const std::int64_t version = group->weights().version();
    step({true, true});
    expect_steps(4, 4);
    EXPECT_EQ(group->weights().version(), version);
    for (const auto& [state, shards] : optimizer.state_shards(0)) {
      for (const NamedShard& shard : shards) {
        EXPECT_EQ(shard.tensor.numel(), shard.name() == "weight" ? 40 : 25);
      }
    }
  }
}

TEST(Optimizer, GradScaleMultipliesGradients) {
  const auto a = make_group(one_rank());
  const auto b = make_group(one_rank());
  Sgd sgd_a({a.get()}, {.momentum = 0.9});
  Sgd sgd_b({b.get()}, {.momentum = 0.9});
  for (int step = 0; step < 3; ++step) {
    reduce_constant(*a, 4);
    reduce_constant(*b, 1);
    sgd_a.step(0.1, at::scalar_tensor(0.25));
    sgd_b.step(0.1);
  }
  EXPECT_TRUE(a->weights().main().local().equal(b->weights().main().local()));
}

TEST(Optimizer, StartsFromForeignWrites) {
  const auto group = make_group(one_rank());
  Sgd sgd({group.get()}, {});
  weight(*group).fill_(8);
  reduce_constant(*group, 1);
  sgd.step(0.5);
  EXPECT_TRUE(weight(*group).equal(at::full({40}, 7.5)));
  EXPECT_TRUE(group->weights().compute_shard().narrow(0, 0, 40).equal(
      at::full({40}, 7.5, at::kBFloat16)));
}

TEST(Optimizer, RefusesUnreducedGradients) {
  const auto group = make_group(one_rank(), "zero1");
  Sgd sgd({group.get()}, {});
  const at::Tensor before = group->weights().main().local().clone();
  for (const bool collective : {false, true}) {
    const at::Tensor gradient =
        whole_gradient(*group, at::ones({40}), at::ones({25}));
    group->gradients().reduce(
        gradient,
        group->plan_reduction(collective, false));
    EXPECT_THAT(
        message(ErrorCode::usage, [&] { sgd.step(1); }),
        HasSubstr("gradients of block wait for the last microbatch"));
    EXPECT_TRUE(group->weights().main().local().equal(before));
    sgd.zero_grad();
    EXPECT_NO_THROW(sgd.step(1));
  }
}

TEST(Optimizer, FrozenGroupsAreSkipped) {
  const auto frozen = make_group(one_rank(), "zero3", {}, false);
  const auto group = make_group(one_rank());
  AdamW adamw({frozen.get(), group.get()}, {});
  ASSERT_EQ(adamw.groups().size(), 1U);
  EXPECT_EQ(adamw.groups()[0], group.get());
  EXPECT_EQ(
      adamw.state_nbytes(),
      2 * 4 * group->weights().main().local().numel());
  EXPECT_EQ(
      Sgd({group.get()}, {.momentum = 0.5}).state_nbytes(),
      4 * group->weights().main().local().numel());
  EXPECT_EQ(Sgd({group.get()}, {}).state_nbytes(), 0);
}

TEST(Optimizer, ErrorsNameTheOption) {
  const auto adamw = [](AdamWOptions options) {
    return message(ErrorCode::config, [&] { AdamW({}, options); });
  };
  const auto sgd = [](SgdOptions options) {
    return message(ErrorCode::config, [&] { Sgd({}, options); });
  };
  EXPECT_THAT(adamw({.beta1 = 1}), HasSubstr("optimizer.beta1"));
  EXPECT_THAT(adamw({.beta2 = -0.1}), HasSubstr("optimizer.beta2"));
  EXPECT_THAT(adamw({.eps = 0}), HasSubstr("optimizer.eps"));
  EXPECT_THAT(adamw({.weight_decay = -1}), HasSubstr("weight_decay"));
  EXPECT_THAT(sgd({.momentum = 1}), HasSubstr("optimizer.momentum"));
  EXPECT_THAT(sgd({.weight_decay = -1}), HasSubstr("weight_decay"));

  ParamGroup odd(
      {.parameters =
           {{.names = {"odd"},
             .shape = {4},
             .attributes = {{"weight_decay", "half"}}}},
       .mesh = one_rank(),
       .strategy = Strategy::named("zero3", 1)},
      {},
      Initializer(0));
  EXPECT_THAT(
      message(ErrorCode::config, [&] { Sgd({&odd}, {}); }),
      HasSubstr("parameter odd: expected attribute weight_decay"));
}

class ShardedSteps : public ::testing::TestWithParam<ParameterRules> {};

TEST_P(ShardedSteps, EqualWholeOnes) {
  const ParameterRules& rules = GetParam();
  const auto whole = make_group(one_rank());
  const at::Tensor w = at::arange(40, at::kFloat) / 64;
  const at::Tensor b = at::arange(25, at::kFloat) / -32;
  Optimizer reference({whole.get()}, rules);
  for (int step = 0; step < 3; ++step) {
    reduce(*whole, whole_gradient(*whole, w, b));
    reference.step(0.1);
    reference.zero_grad();
  }
  for (const char* strategy : {"zero0", "zero1", "zero2", "zero3"}) {
    run_ranks(2, [&](RankContext& context) {
      const auto group = make_group(context.mesh(), strategy);
      Optimizer adamw({group.get()}, rules);
      for (int step = 0; step < 3; ++step) {
        reduce(*group, whole_gradient(*group, w, b));
        adamw.step(0.1);
        adamw.zero_grad();
      }
      for (const NamedShard& shard : group->main_shards()) {
        const at::Tensor want =
            shard.name() == "weight" ? weight(*whole) : bias(*whole);
        EXPECT_TRUE(shard.tensor.equal(
            want.narrow(0, shard.begin, shard.tensor.numel())))
            << strategy << " " << shard.name();
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Rules,
    ShardedSteps,
    ::testing::Values(
        ParameterRules{.rest = {.weight_decay = 0.1}},
        rules_of(
            {.weight_decay = 0.1},
            {.pattern = "bias",
             .lr_mult = 0.1,
             .wd_mult = 0,
             .beta1 = 0.5,
             .eps = 0.01}),
        rules_of(
            {.weight_decay = 0.1},
            {.pattern = "bias",
             .algorithm = Algorithm::sgd,
             .momentum = 0.5})));

}  // namespace
}  // namespace flatshard::testing
