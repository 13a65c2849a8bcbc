// AdamW with states in other formats, and stochastic rounding: the mesh changes
// nothing.
#include "flatshard/optim/adamw.h"

#include "flatshard/core/error.h"
#include "flatshard/core/philox.h"
#include "tests/support/ranks.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace flatshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// With int8, norm and embedding have float32 states. The states of odd end
// inside a block.
const std::vector<std::pair<std::string, std::vector<std::int64_t>>> kShapes = {
    {"norm", {48}},
    {"weight", {17, 256}},
    {"odd", {67, 71}},
    {"embedding", {32, 256}},
    {"bias", {4096}}};

std::unique_ptr<ParamGroup> make_states_group(
    std::shared_ptr<Mesh> mesh,
    const std::string& strategy,
    at::ScalarType main_params = at::kFloat,
    std::int64_t alignment = kInt8Alignment,
    Granularity granularity = {}) {
  std::vector<GroupParameter> parameters;
  for (const auto& [name, shape] : kShapes) {
    GroupParameter p{
        .names = {name},
        .shape = shape,
        .placement = {.granularity = granularity},
        .init = InitSpec::normal(0, 1)};
    if (name == "embedding") {
      p.attributes = {{kStateDtypeAttribute, "float32"}};
    }
    if (name == "odd") {
      p.attributes = {{kWeightDecayAttribute, "none"}};
    }
    parameters.push_back(std::move(p));
  }
  const int num_axes = mesh->num_axes();
  return std::make_unique<ParamGroup>(
      GroupSpec{
          .name = "block",
          .parameters = std::move(parameters),
          .mesh = std::move(mesh),
          .strategy = Strategy::named(strategy, num_axes)},
      ParamGroupOptions{
          .precision =
              {.compute = at::kBFloat16,
               .reduce = at::kFloat,
               .main_params = main_params},
          .alignment = alignment},
      Initializer(5));
}

at::Tensor gradient_of(std::size_t i, int step) {
  return at::randn(
      kShapes[i].second,
      at::detail::createCPUGenerator(100 * step + i),
      at::kFloat);
}

// A parameter that has no gradient in the second step.
constexpr std::size_t kIdle = 1;

// Rank 0 has the gradient, so its sum is the same for any number of ranks.
void train(ParamGroup& group, Optimizer& adamw, int steps, int first = 0) {
  group.set_divisor(1);
  const bool has_gradient = group.mesh()->rank() == 0;
  for (int step = first; step < first + steps; ++step) {
    std::vector<bool> without(kShapes.size());
    without[kIdle] = step == 1;
    const at::Tensor flat = at::zeros({group.layout().numel()});
    for (std::size_t i = 0; has_gradient && i < kShapes.size(); ++i) {
      const at::Tensor g = gradient_of(i, step).view(-1);
      const auto index = static_cast<std::int64_t>(i);
      flat.narrow(0, group.layout().tensor_offset(index), g.numel()).copy_(g);
    }
    group.gradients().reduce(flat, group.plan_reduction(true, true));
    adamw.step(0.01, at::scalar_tensor(0.5F), {without});
    adamw.zero_grad();
  }
}

/// AdamW that rounds bfloat16 weights stochastically.
struct RoundingAdamW : Optimizer {
  /// @param rules  of parameters with another format.
  RoundingAdamW(
      ParamGroup& group,
      StateFormat format,
      std::vector<ParameterRule> rules = {})
      : Optimizer(
            {&group},
            ParameterRules{
                .rest = {.weight_decay = 0.1, .state_dtype = format},
                .rules = std::move(rules)}) {
    set_stochastic_rounding(3);
  }
};

// All values of weights and states, by "role/name".
using Values = std::map<std::string, at::Tensor>;

std::vector<std::pair<std::string, NamedShard>> shards_of(
    const ParamGroup& group,
    const Optimizer& adamw) {
  std::vector<std::pair<std::string, NamedShard>> all;
  for (const NamedShard& shard : group.main_shards()) {
    all.emplace_back("weight/" + shard.name(), shard);
  }
  for (const auto& [role, shards] : adamw.state_shards(0)) {
    for (const NamedShard& shard : shards) {
      all.emplace_back(role + "/" + shard.name(), shard);
    }
  }
  return all;
}

struct Case {
  StateFormat format;
  at::ScalarType main_params;
  std::vector<ParameterRule> rules = {};
};

class StatesOnRanks : public ::testing::TestWithParam<Case> {};

TEST_P(StatesOnRanks, EqualOneRank) {
  const auto& [format, main_params, rules] = GetParam();
  constexpr int kSteps = 4;
  const auto whole =
      make_states_group(Mesh::single(at::kCPU), "zero3", main_params);
  RoundingAdamW one(*whole, format, rules);
  train(*whole, one, kSteps);
  Values expected;
  for (const auto& [key, shard] : shards_of(*whole, one)) {
    expected[key] = shard.tensor.clone();
  }
  // Of 20 ranks most have no part of most parameters.
  for (const int ranks : {2, 3, 4, 20}) {
    run_ranks(ranks, [&, main = main_params](RankContext& context) {
      const auto group = make_states_group(context.mesh(), "zero3", main);
      RoundingAdamW adamw(*group, GetParam().format, GetParam().rules);
      train(*group, adamw, kSteps);
      for (const auto& [key, shard] : shards_of(*group, adamw)) {
        EXPECT_TRUE(shard.tensor.equal(
            expected.at(key).narrow(0, shard.begin, shard.tensor.numel())))
            << key << " on rank " << context.rank << " of " << ranks;
      }
    });
  }
  run_ranks(4, [&, main = main_params](RankContext& context) {
    const auto group = make_states_group(
        context.mesh({{"replicate", 2}, {"shard", 2}}),
        "hsdp",
        main);
    RoundingAdamW adamw(*group, GetParam().format, GetParam().rules);
    train(*group, adamw, kSteps);
    for (const auto& [key, shard] : shards_of(*group, adamw)) {
      EXPECT_TRUE(shard.tensor.equal(
          expected.at(key).narrow(0, shard.begin, shard.tensor.numel())))
          << key << " with replicas";
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Formats,
    StatesOnRanks,
    ::testing::Values(
        Case{StateFormat::float32, at::kFloat},
        Case{StateFormat::float32, at::kBFloat16},
        Case{StateFormat::bfloat16, at::kFloat},
        Case{StateFormat::int8, at::kFloat},
        Case{StateFormat::int8, at::kBFloat16},
        Case{
            StateFormat::float32,
            at::kFloat,
            {{.pattern = "weight|norm", .state_dtype = StateFormat::int8},
             {.pattern = "odd", .state_dtype = StateFormat::bfloat16}}}),
    [](const auto& info) {
      if (!info.param.rules.empty()) {
        return std::string("Several");
      }
      const StateFormat format = info.param.format;
      const std::string name = format == StateFormat::float32    ? "Float32"
                               : format == StateFormat::bfloat16 ? "BFloat16"
                                                                 : "Int8";
      return info.param.main_params == at::kFloat ? name : name + "Rounded";
    });

TEST(StateDtypes, TheFormatGoesByTheWholeParameter) {
  const auto group = make_states_group(Mesh::single(at::kCPU), "zero3");
  RoundingAdamW adamw(*group, StateFormat::int8);
  std::map<std::string, at::ScalarType> dtypes;
  std::map<std::string, std::vector<std::int64_t>> scales;
  for (const auto& [role, shards] : adamw.state_shards(0)) {
    for (const NamedShard& shard : shards) {
      dtypes[role + "/" + shard.name()] = shard.tensor.scalar_type();
      if (role == "exp_avg.scale") {
        scales[shard.name()] = shard.whole_shape();
      }
    }
  }
  EXPECT_EQ(dtypes.at("exp_avg/norm"), at::kFloat);
  EXPECT_EQ(dtypes.at("exp_avg/embedding"), at::kFloat);
  EXPECT_EQ(dtypes.at("exp_avg/weight"), at::kChar);
  EXPECT_EQ(dtypes.at("exp_avg_sq/weight"), at::kByte);
  EXPECT_EQ(dtypes.at("exp_avg.scale/weight"), at::kFloat);
  using Shape = std::vector<std::int64_t>;
  EXPECT_EQ(
      scales,
      (std::map<std::string, Shape>{
          {"weight", {17, 1}},
          {"odd", {(67 * 71 + 255) / 256}},
          {"bias", {16}}}));
  EXPECT_LT(
      adamw.state_nbytes(),
      2 * 4 * (48 + 32 * 256) + 5 * 256 * 8 +
          2 * (17 * 256 + 67 * 71 + 4096) * 260 / 256);
}

TEST(StateDtypes, ParametersWithoutGradientKeepTheirValues) {
  for (const StateFormat format :
       {StateFormat::float32, StateFormat::bfloat16, StateFormat::int8}) {
    const auto group =
        make_states_group(Mesh::single(at::kCPU), "zero3", at::kBFloat16);
    RoundingAdamW adamw(*group, format);
    const auto values = [&] {
      Values own;
      for (const auto& [name, shard] : shards_of(*group, adamw)) {
        own[name] = shard.tensor.clone();
      }
      return own;
    };
    train(*group, adamw, 1);
    const Values before = values();
    train(*group, adamw, 1, 1);
    for (const auto& [name, value] : values()) {
      EXPECT_EQ(
          value.equal(before.at(name)),
          name.ends_with("/" + kShapes[kIdle].first))
          << name;
    }
  }
}

// int8 follows float32 closely, and bfloat16 too.
TEST(StateDtypes, UpdatesAreNearThoseOfFloat32) {
  std::map<StateFormat, at::Tensor> weights;
  for (const StateFormat format :
       {StateFormat::float32, StateFormat::bfloat16, StateFormat::int8}) {
    const auto group = make_states_group(Mesh::single(at::kCPU), "zero3");
    AdamW adamw({group.get()}, {.state_dtype = format});
    const at::Tensor start = group->weights().main().local().clone();
    train(*group, adamw, 10);
    weights[format] = group->weights().main().local() - start;
  }
  const at::Tensor& want = weights.at(StateFormat::float32);
  for (const StateFormat format : {StateFormat::bfloat16, StateFormat::int8}) {
    const double error =
        ((weights.at(format) - want).norm() / want.norm()).item<double>();
    EXPECT_LT(error, 0.03);
    EXPECT_GT(error, 0);
  }
}

TEST(StateDtypes, NonFiniteGradientsReachTheWeights) {
  const auto group = make_states_group(Mesh::single(at::kCPU), "zero3");
  RoundingAdamW adamw(*group, StateFormat::int8);
  const at::Tensor flat = at::ones({group->layout().numel()});
  flat[group->layout().tensor_offset(1) + 300] =
      std::numeric_limits<float>::quiet_NaN();
  group->gradients().reduce(flat, group->plan_reduction(true, true));
  adamw.step(0.01);
  EXPECT_EQ(
      group->main_shards()[1].tensor.isnan().sum().item<std::int64_t>(),
      1);
  group->gradients().reduce(
      at::ones({group->layout().numel()}),
      group->plan_reduction(true, true));
  adamw.step(0.01);
  // The state of its block is lost.
  EXPECT_EQ(
      group->main_shards()[1].tensor.isnan().sum().item<std::int64_t>(),
      kStateBlock);
}

TEST(StateDtypes, RefusesLayoutsThatSplitBlocks) {
  // Returns the error, the same on all ranks.
  const auto refused = [](std::int64_t alignment, Granularity granularity) {
    std::vector<std::string> texts(3);
    run_ranks(3, [&](RankContext& context) {
      const auto group = make_states_group(
          context.mesh(),
          "zero3",
          at::kFloat,
          alignment,
          granularity);
      try {
        const RoundingAdamW adamw(*group, StateFormat::int8);
      } catch (const Error& error) {
        texts[static_cast<std::size_t>(context.rank)] = error.message();
      }
    });
    EXPECT_EQ(texts[1], texts[0]);
    EXPECT_EQ(texts[2], texts[0]);
    return texts[0];
  };
  EXPECT_THAT(
      refused(kLayoutAlignment, {}),
      HasSubstr("optimizer.state_dtype = int8: expected shards of full blocks "
                "of 256 elements"));
  EXPECT_THAT(
      refused(kInt8Alignment, Granularity::chunk()),
      HasSubstr("use parallelism.granularity = element"));
  EXPECT_EQ(refused(kInt8Alignment, Granularity::row()), "");
  EXPECT_EQ(refused(kInt8Alignment, Granularity::tensor()), "");
}

// Tensor parallelism: the blocks of a slice are blocks of the full tensor.
TEST(StateDtypes, SlicesConsistOfFullBlocks) {
  const auto group = make_states_group(Mesh::single(at::kCPU), "zero3");
  group->set_part(1, TensorSlice().cut(1, 1, 2), Replicas{});
  RoundingAdamW adamw(*group, StateFormat::int8);
  for (const auto& [role, shards] : adamw.state_shards(0)) {
    for (const NamedShard& shard : shards) {
      if (role == "exp_avg.scale" && shard.name() == "weight") {
        EXPECT_EQ(shard.whole_shape(), (std::vector<std::int64_t>{17, 2}));
        EXPECT_EQ(
            shard.boxes(),
            (std::vector<Rectangle>{{.start = {0, 1}, .length = {17, 1}}}));
      }
    }
  }
  group->set_part(2, TensorSlice().cut(0, 0, 2), Replicas{});
  try {
    const RoundingAdamW refused(*group, StateFormat::int8);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(
        error.what(),
        AllOf(
            HasSubstr("odd of shape [67, 71] is a slice of a tensor of shape "
                      "[134, 71] and splits blocks of 256 elements"),
            HasSubstr("expert_parallel_degree")));
  }
  const RoundingAdamW accepted(*group, StateFormat::bfloat16);
}

// Formats of several parameters meet at blocks.
TEST(StateDtypes, SeveralFormatsNeedBlocks) {
  const auto group = make_states_group(
      Mesh::single(at::kCPU),
      "zero3",
      at::kFloat,
      kLayoutAlignment);
  try {
    const RoundingAdamW refused(
        *group,
        StateFormat::float32,
        {{.pattern = "norm", .state_dtype = StateFormat::bfloat16}});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(
        error.what(),
        HasSubstr("block: states of several formats need shards and "
                  "parameters that start at multiples of 256 elements"));
  }
  RoundingAdamW adamw(*group, StateFormat::bfloat16);
  try {
    adamw.set_values(0, {.weight_decay = 0.1});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("the state_dtype"));
  }
}

TEST(StateScales, OfASliceAreASliceOfAllScales) {
  using Shape = std::vector<std::int64_t>;
  const auto whole = state_scales({67, 71}, {});
  ASSERT_TRUE(whole);
  EXPECT_EQ(whole->shape, (Shape{19}));
  // Two of eight experts: one run of the full tensor.
  const auto experts = state_scales({2, 12, 64}, TensorSlice().cut(0, 1, 4));
  ASSERT_TRUE(experts);
  EXPECT_EQ(experts->shape, (Shape{6}));
  EXPECT_EQ(experts->slice, TensorSlice().take(0, 24, {{6, 12}}));
  // Rows of blocks.
  const auto rows = state_scales({17, 512}, TensorSlice().cut(1, 1, 2));
  ASSERT_TRUE(rows);
  EXPECT_EQ(rows->shape, (Shape{17, 2}));
  EXPECT_EQ(rows->slice.whole_shape(rows->shape), (Shape{17, 4}));
  // The heads of a rank, as tensor parallelism counts them.
  const auto heads =
      state_scales({17, 512}, TensorSlice().take(1, 1536, {{512, 1024}}));
  ASSERT_TRUE(heads);
  EXPECT_EQ(heads->shape, (Shape{17, 2}));
  EXPECT_EQ(heads->slice, TensorSlice().take(1, 6, {{2, 4}}));
  for (const auto& [shape, slice] :
       {std::pair{Shape{2, 12, 32}, TensorSlice().cut(2, 1, 2)},
        std::pair{Shape{17, 128}, TensorSlice().cut(1, 1, 2)},
        std::pair{Shape{17, 384}, TensorSlice().take(1, 768, {{0, 384}})},
        std::pair{Shape{67, 71}, TensorSlice().cut(0, 0, 2)},
        std::pair{Shape{2, 12, 64}, TensorSlice().cut(0, 0, 2, 2)}}) {
    EXPECT_FALSE(state_scales(shape, slice));
  }
}

// The mean of many draws is the float32 update, and steps differ.
TEST(StateDtypes, StochasticRoundingIsUnbiased) {
  double sum = 0;
  constexpr int kSeeds = 64;
  std::vector<at::Tensor> weights;
  for (int seed = 0; seed < kSeeds; ++seed) {
    const auto group =
        make_states_group(Mesh::single(at::kCPU), "zero3", at::kBFloat16);
    at::Tensor main = group->main_shards()[4].tensor;
    main.fill_(1.0F);
    AdamW adamw({group.get()}, {.weight_decay = 0});
    adamw.set_stochastic_rounding(static_cast<std::uint64_t>(seed));
    group->gradients().reduce(
        at::ones({group->layout().numel()}),
        group->plan_reduction(true, true));
    adamw.step(1e-3);  // a quarter of bfloat16's step below 1
    weights.push_back(group->main_shards()[4].tensor.clone());
    sum += weights.back().to(at::kDouble).mean().item<double>();
  }
  EXPECT_FALSE(weights[0].equal(weights[1]));
  // 64 * 4096 draws of a step of 2^-8 with a deviation of at most half of it.
  EXPECT_NEAR(sum / kSeeds, 1 - 1e-3, 4 * 0x1p-9 / 512);
}

}  // namespace
}  // namespace flatshard::testing
