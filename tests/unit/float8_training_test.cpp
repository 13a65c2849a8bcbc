// A Llama with FP8 weights: N ranks against one, whatever is gathered when.
#include "flatshard/models/llama.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/optim/grad_norm.h"
#include "flatshard/schedule/simulate.h"
#include "flatshard/unit/fully_shard.h"
#include "tests/support/message_of.h"
#include "tests/unit/training.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

namespace flatshard::testing {
namespace {

using float8::Recipe;
using models::ActivationCheckpoint;
using ::testing::HasSubstr;

constexpr std::int64_t kDim = 128;
constexpr std::int64_t kFfn = 256;
constexpr std::int64_t kSeq = 24;  // no recipe's multiple
constexpr std::int64_t kVocab = 64;
constexpr int kLayers = 2;

struct Float8Case {
  std::optional<Float8Format> format;
  std::string strategy = "zero3";
  std::vector<std::int64_t> mesh = {1};
  int microbatches = 1;
  int steps = 3;
  GatherParts gather_parts = GatherParts::recomputed;
  ActivationCheckpoint checkpoint = ActivationCheckpoint::none;
  bool reshard_after_forward = true;
  bool offload = false;
  bool poison = false;
  bool freezes_attention = false;
  bool prefetches_between_steps = true;
  int max_delay_us = 0;

  int world() const {
    int product = 1;
    for (const std::int64_t size : mesh) {
      product *= static_cast<int>(size);
    }
    return product;
  }
};

struct Float8Run {
  /// By step and microbatch of all ranks, in rank order.
  std::map<std::pair<int, int>, double> losses;
  std::map<std::string, std::vector<float>> weights;
  std::vector<Action> last_step;
  std::vector<UnitSpec> units;
};

at::Tensor tokens(int step, int index) {
  at::Generator generator = at::detail::createCPUGenerator(
      static_cast<std::uint64_t>(1 + step * 100 + index));
  return at::randint(kVocab, {2, kSeq}, generator, at::kLong);
}

models::Llama make_llama(ActivationCheckpoint checkpoint) {
  return models::Llama(
      models::ModelConfig{
          .dim = kDim,
          .layers = kLayers,
          .heads = 4,
          .kv_heads = 4,
          .ffn_dim = kFfn,
          .vocab_size = kVocab,
          .max_seq_len = kSeq},
      models::LlamaOptions{.activation_checkpoint = checkpoint});
}

std::shared_ptr<Runtime> shard(
    models::Llama& llama,
    const std::shared_ptr<Mesh>& mesh,
    const Float8Case& c) {
  FullyShardOptions options{
      .strategy = c.strategy,
      .gather_parts = c.gather_parts,
      .seed = 5,
      .group = {.offload = c.offload, .pin_memory = false},
      .runtime = {
          .reshard_after_forward = c.reshard_after_forward,
          .streams =
              {.delay_seed = 3 + static_cast<std::uint64_t>(mesh->rank()),
               .max_delay_us = c.max_delay_us},
          .trace = true,
          .debug = {.poison = c.poison}}};
  for (const auto& unit : llama->unit_modules()) {
    options.units.push_back(dynamic_cast<nn::Module*>(unit.get()));
  }
  if (c.format) {
    options.float8_of = [format = *c.format](
                            const std::string& /*name*/,
                            const std::vector<std::int64_t>& shape) {
      return format.why_not(shape).empty() ? std::optional(format)
                                           : std::nullopt;
    };
  }
  return fully_shard(*llama, mesh, std::move(options));
}

Float8Run train(const Float8Case& c) {
  Float8Run result;
  std::mutex mutex;
  run_ranks(c.world(), [&](RankContext& context) {
    std::vector<MeshAxis> axes;
    for (std::size_t i = 0; i < c.mesh.size(); ++i) {
      axes.push_back({"axis" + std::to_string(i), c.mesh[i]});
    }
    models::Llama llama = make_llama(c.checkpoint);
    for (const auto& p : nn::named_parameters(*llama)) {
      if (c.freezes_attention &&
          p.name.find("self_attn") != std::string::npos) {
        at::Tensor(p.tensor).set_requires_grad(false);
      }
    }
    const auto runtime = shard(llama, context.mesh(axes), c);
    AdamW optimizer(runtime->groups(), AdamWOptions{});
    for (int step = 0; step < c.steps; ++step) {
      runtime->clear_trace();
      for (int m = 0; m < c.microbatches; ++m) {
        runtime->set_is_last_microbatch(m == c.microbatches - 1);
        const int index = context.rank * c.microbatches + m;
        const at::Tensor in = tokens(step, index);
        const at::Tensor loss = llama(in, in.roll(1, 1));
        (loss / c.microbatches).backward();
        const std::lock_guard lock(mutex);
        result.losses[{step, index}] = loss.item<double>();
      }
      const GradNorm norm = grad_norm_and_scale(runtime->groups(), 1e6);
      optimizer.step(1e-2, norm.scale);
      optimizer.zero_grad();
      if (c.prefetches_between_steps && step % 2 == 0) {
        runtime->prefetch_forward();
      }
    }
    optimizer.wait();
    runtime->synchronize();
    collect_weights(*runtime, mutex, result.weights);
    if (context.rank == 0) {
      result.last_step = runtime->trace().actions;
      result.units = runtime->scheduler().units();
    }
  });
  return result;
}

std::vector<Float8Format> formats() {
  return {
      {.recipe = Recipe::tensorwise},
      {.recipe = Recipe::rowwise},
      {.recipe = Recipe::rowwise, .stored_columns = true},
      {.recipe = Recipe::blockwise},
      {.recipe = Recipe::mxfp8},
      {.recipe = Recipe::mxfp8, .stored_columns = true}};
}

void expect_same(const Float8Run& a, const Float8Run& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_FALSE(a.weights.empty());
  EXPECT_EQ(a.weights, b.weights);
}

class Float8Formats : public ::testing::TestWithParam<Float8Format> {};
INSTANTIATE_TEST_SUITE_P(
    All,
    Float8Formats,
    ::testing::ValuesIn(formats()),
    [](const auto& info) {
      return std::string(float8::to_string(info.param.recipe)) +
             (info.param.stored_columns ? "_stored" : "");
    });

TEST_P(Float8Formats, TwoRanksAreBitwiseOneWithTwoMicrobatches) {
  const Float8Run one = train({.format = GetParam(), .microbatches = 2});
  const Float8Run two =
      train({.format = GetParam(), .mesh = {2}, .max_delay_us = 300});
  expect_same(two, one);
  EXPECT_LT(one.losses.at({2, 0}), one.losses.at({0, 0}));
  // It is FP8, and near to bfloat16: products are off by 2^-4 / sqrt(k) or so,
  // of logits that are small at first.
  static const Float8Run bf16 = train({.microbatches = 2});
  EXPECT_NE(one.losses.at({0, 0}), bf16.losses.at({0, 0}));
  for (const auto& [at, loss] : bf16.losses) {
    EXPECT_NEAR(one.losses.at(at), loss, 0.05) << at.first;
  }
}

// A LoRA's base, say.
TEST_P(Float8Formats, FrozenWeightsAreGatheredToo) {
  Float8Case c{
      .format = GetParam(),
      .microbatches = 2,
      .steps = 2,
      .freezes_attention = true};
  const Float8Run one = train(c);
  c.microbatches = 1;
  c.mesh = {2};
  expect_same(train(c), one);
}

TEST(Float8Training, EveryStrategyComputesTheSame) {
  const Float8Format format{.recipe = Recipe::rowwise, .stored_columns = true};
  const Float8Run one = train({.format = format, .microbatches = 2});
  for (const char* strategy : {"zero0", "zero1", "zero2"}) {
    SCOPED_TRACE(strategy);
    expect_same(
        train({.format = format, .strategy = strategy, .mesh = {2}}),
        one);
    expect_same(
        train(
            {.format = Float8Format{.recipe = Recipe::tensorwise},
             .strategy = strategy,
             .mesh = {2}}),
        train(
            {.format = Float8Format{.recipe = Recipe::tensorwise},
             .microbatches = 2}));
  }
  const Float8Run four = train({.format = format, .microbatches = 4});
  for (const char* strategy : {"hsdp", "hfsdp"}) {
    SCOPED_TRACE(strategy);
    const Float8Run run =
        train({.format = format, .strategy = strategy, .mesh = {2, 2}});
    for (const auto& [at, loss] : four.losses) {
      // The sums of four gradients are taken in another order.
      EXPECT_NEAR(run.losses.at(at), loss, at.first == 0 ? 0 : 2e-2);
    }
  }
}

// What is gathered when changes no bit.
class Float8Columns : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(DerivedAndStored, Float8Columns, ::testing::Bool());

TEST_P(Float8Columns, PartsKeepingOffloadAndPoisonChangeNothing) {
  Float8Case plain{
      .format =
          Float8Format{.recipe = Recipe::rowwise, .stored_columns = GetParam()},
      .mesh = {2}};
  const Float8Run want = train(plain);
  plain.max_delay_us = 200;
  const auto check = [&](const std::function<void(Float8Case&)>& change) {
    Float8Case c = plain;
    change(c);
    expect_same(train(c), want);
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
                       GatherParts parts = GatherParts::recomputed) {
    return train(
        {.format = format,
         .mesh = {2},
         .steps = 2,
         .gather_parts = parts,
         .checkpoint = checkpoint,
         .prefetches_between_steps = false});
  };
  constexpr std::int64_t kAttention = 4 * kDim * kDim;
  constexpr std::int64_t kMlp = 3 * kDim * kFfn;
  const Float8Run none = run(ActivationCheckpoint::none);
  EXPECT_EQ(
      gathered(none, Phase::forward, Unit::kRowPlane),
      kLayers * (kAttention + kMlp));
  EXPECT_EQ(gathered(none, Phase::forward, Unit::kColumnPlane), 0);
  EXPECT_EQ(gathered(none, Phase::backward, Unit::kRowPlane), 0);
  EXPECT_EQ(
      gathered(none, Phase::backward, Unit::kColumnPlane),
      kLayers * (kAttention + kMlp));
  // Down's product is recomputed for nothing but its shape.
  const Float8Run some = run(ActivationCheckpoint::selective);
  EXPECT_EQ(gathered(some, Phase::backward, Unit::kRowPlane), kLayers * kMlp);
  EXPECT_EQ(
      gathered(some, Phase::backward, Unit::kColumnPlane),
      kLayers * (kAttention + kMlp));
  // Off is off.
  const Float8Run whole =
      run(ActivationCheckpoint::selective, GatherParts::unit);
  EXPECT_EQ(
      gathered(whole, Phase::backward, Unit::kRowPlane),
      kLayers * (kAttention + kMlp));
}

TEST(Float8Training, AStrayReadNamesTheParameter) {
  run_ranks(1, [](RankContext& context) {
    models::Llama llama = make_llama(ActivationCheckpoint::none);
    const auto runtime = shard(
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
        runtime->unshard(2);
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
                    "model.layers.1 is held in FP8"));
    }
    runtime->reshard(2);
  });
}

TEST(Float8Training, TheHeadAndWhatIsNotALinearStayBfloat16) {
  run_ranks(1, [](RankContext& context) {
    models::Llama llama = make_llama(ActivationCheckpoint::none);
    const auto runtime = shard(
        llama,
        context.mesh(),
        {.format = Float8Format{.recipe = Recipe::tensorwise}});
    int num_fp8 = 0;
    for (ParamGroup* group : runtime->all_groups()) {
      for (const GroupParameter& p : group->parameters()) {
        const bool is_fp8 = group->weights().float8() != nullptr;
        num_fp8 += is_fp8;
        EXPECT_EQ(
            is_fp8,
            p.names.front().find("_proj.weight") != std::string::npos)
            << p.names.front();
      }
    }
    EXPECT_EQ(num_fp8, 7 * kLayers);
  });
}

TEST(Float8Training, GraphsAreRefused) {
  run_ranks(1, [](RankContext& context) {
    models::Llama llama = make_llama(ActivationCheckpoint::none);
    FullyShardOptions options{
        .float8_of =
            [](const std::string&, const std::vector<std::int64_t>&) {
              return std::optional(Float8Format{});
            },
        .runtime = {.graphs = {.enabled = true, .emulate_on_cpu = true}}};
    EXPECT_THAT(
        message_of([&] {
          const auto unused =
              fully_shard(*llama, context.mesh(), std::move(options));
        }),
        HasSubstr("GraphOptions::enabled with FP8 weights"));
  });
}

}  // namespace
}  // namespace flatshard::testing
