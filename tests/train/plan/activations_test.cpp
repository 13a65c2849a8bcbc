// What a plan says that autograd saves of a block is what it saves.
#include "flatshard/models/llama.h"
#include "flatshard/train/model_config.h"
#include "flatshard/train/plan/planned_run.h"

#include <ATen/ATen.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace flatshard {
namespace {

/// Bytes that this thread has allocated on the CPU and not given back.
class LiveBytes : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(
      void* /*ptr*/,
      std::int64_t alloc_size,
      std::size_t /*total_allocated*/,
      std::size_t /*total_reserved*/,
      c10::Device /*device*/) override {
    nbytes += alloc_size;
  }
  bool memoryProfilingEnabled() const override { return true; }

  std::int64_t nbytes = 0;
};

constexpr std::int64_t kTokens = 128;

Config config_of(const std::vector<std::string>& set) {
  return resolve_config(
      parse_config(
          "[model]\nfamily = \"auto\"\ndim = 64\nlayers = 1\nheads = 4\n"
          "kv_heads = 4\nffn_dim = 160\nvocab_size = 64\n"
          "[data]\ntrain = \"random\"\n[training]\nseq_len = 128\n"
          "[precision]\ncompute = \"bfloat16\"\n",
          "test.toml",
          set),
      1);
}

/// What is alive after a forward of a block: what autograd saved with the
/// block's result in place of its input.
std::int64_t measured(const Config& config) {
  const models::ModelConfig shape = model_config(config);
  models::Llama model(
      shape,
      models::LlamaOptions{
          .activation_checkpoint = config.activation_checkpoint.mode});
  nn::materialize(*model, at::kCPU, at::kBFloat16, nn::random_fill());
  const auto input = [&] {
    return at::randn({1, kTokens, shape.dim}).to(at::kBFloat16);
  };
  // The rotary table is the model's.
  model->blocks().front()(input());
  const at::Tensor x = input().requires_grad_();
  const auto live = std::make_shared<LiveBytes>();
  at::Tensor y;
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, live);
    y = model->blocks().front()(x);
  }
  return live->nbytes;
}

plan::LayerWork planned(const Config& config) {
  const plan::Job job = plan_job(config, model_config(config), 1, 1);
  return job.layer_kinds[job.kind_of_layer.front()];
}

TEST(Activations, OfADenseBlockAreThoseThatAutogradSaves) {
  const Config config = config_of({});
  EXPECT_EQ(planned(config).saved_nbytes, measured(config));
}

TEST(Activations, OfABlockWithNormsOfHeads) {
  const Config config = config_of(
      {"model.qk_norm=true",
       "model.family=moe",
       "model.num_experts=4",
       "model.dense_layers=1"});
  EXPECT_EQ(planned(config).saved_nbytes, measured(config));
}

TEST(Activations, OfARecomputedBlockAreItsInput) {
  const Config full = config_of({"activation_checkpoint.mode=full"});
  EXPECT_EQ(planned(full).input_nbytes, measured(full));
  const Config selective = config_of({"activation_checkpoint.mode=selective"});
  EXPECT_EQ(planned(selective).saved_nbytes, measured(selective));
}

// The router's numbers depend on the kernels: the CPU keeps a few more of them
// than CUDA does.
TEST(Activations, OfABlockWithExpertsAreNearThoseThatAutogradSaves) {
  const Config config = config_of(
      {"model.family=moe",
       "model.num_experts=4",
       "model.experts_per_token=2",
       "model.moe_ffn_dim=96"});
  const auto want = static_cast<double>(measured(config));
  EXPECT_NEAR(
      static_cast<double>(planned(config).saved_nbytes) / want,
      1,
      0.03);
}

// Kernels in FP8 are those of the weights that are in FP8.
TEST(Work, KindsOfLayersDifferByTheirFloat8Weights) {
  const auto kinds = [](const std::vector<std::string>& set) {
    std::vector<std::string> all{
        "model.layers=4",
        "model.dim=64",
        "training.seq_len=128"};
    all.insert(all.end(), set.begin(), set.end());
    const Config config = config_of(all);
    return plan_job(config, model_config(config), 1, 1);
  };
  const auto num_float8 = [](const plan::LayerWork& layer) {
    std::int64_t count = 0;
    for (const auto& [node, work] : layer.nodes) {
      for (const plan::Kernel& kernel : work.forward) {
        count += kernel.recipe.empty() ? 0 : 1;
      }
    }
    return count;
  };
  const plan::Job plain = kinds({});
  EXPECT_EQ(plain.kind_of_layer, (std::vector<int>{0, 0, 0, 0}));
  EXPECT_EQ(num_float8(plain.layer_kinds[0]), 0);
  const plan::Job all = kinds({"float8.recipe=rowwise"});
  EXPECT_EQ(all.kind_of_layer, (std::vector<int>{0, 0, 0, 0}));
  EXPECT_EQ(num_float8(all.layer_kinds[0]), 7);
  const plan::Job some = kinds(
      {"float8.recipe=rowwise",
       "float8.keep_first_last=true",
       "float8.exclude=*o_proj*"});
  EXPECT_EQ(some.kind_of_layer, (std::vector<int>{0, 1, 1, 0}));
  EXPECT_EQ(num_float8(some.layer_kinds[0]), 0);
  EXPECT_EQ(num_float8(some.layer_kinds[1]), 6);
}

}  // namespace
}  // namespace flatshard
