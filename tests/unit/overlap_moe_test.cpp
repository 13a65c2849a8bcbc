// Models with experts under the 1F1B schedule.
#include "flatshard/core/error.h"
#include "flatshard/models/llama.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/unit/overlap_runner.h"
#include "tests/unit/training.h"

#include <gtest/gtest.h>

#include <mutex>

namespace flatshard::testing {
namespace {

constexpr std::int64_t kOverlapVocab = 64;

struct MoeOverlapRun {
  std::string strategy = "zero3";
  bool with_runner = true;
  bool interleave = true;
  bool delay = false;
  bool recompute = false;
  std::int64_t shared_experts = 0;
};

struct MoeOverlapResult {
  std::map<std::pair<int, int>, double> losses;
  std::map<std::string, std::vector<float>> weights;
  std::vector<std::int64_t> counts;
};

MoeOverlapResult train_overlapped_moe(const MoeOverlapRun& run) {
  constexpr int kMicrobatches = 3;
  constexpr int kSteps = 3;
  MoeOverlapResult result;
  std::mutex mutex;
  run_ranks(2, [&](RankContext& context) {
    models::Llama llama(
        models::ModelConfig{
            .family = "moe",
            .dim = 32,
            .layers = 3,
            .heads = 4,
            .kv_heads = 2,
            .ffn_dim = 64,
            .vocab_size = kOverlapVocab,
            .max_seq_len = 16,
            .qk_norm = true,
            .moe =
                {.num_experts = 8,
                 .experts_per_token = 2,
                 .ffn_dim = 32,
                 .shared_experts = run.shared_experts,
                 .dense_layers = 1}},
        models::LlamaOptions{.moe = {.aux_loss = 0.01, .z_loss = 0.001}});
    const StreamOptions streams{
        .delay_seed = 3 + static_cast<std::uint64_t>(context.rank),
        .max_delay_us = 200};
    FullyShardOptions options{.strategy = run.strategy, .seed = 11};
    options.runtime.streams = streams;
    for (models::LlamaBlock& block : llama->blocks()) {
      options.units.push_back(block.get());
    }
    const auto runtime = fully_shard(*llama, context.mesh(), options);
    AdamW optimizer(runtime->groups(), AdamWOptions{});
    int step = 0;
    const auto tokens = [&](int m) {
      return at::randint(
          kOverlapVocab,
          {1, 16},
          at::make_generator<at::CPUGeneratorImpl>(
              static_cast<std::uint64_t>(100 * step + 10 * context.rank + m)),
          at::kLong);
    };
    std::unique_ptr<OverlapRunner> runner;
    if (run.with_runner) {
      OverlapModel pieces{
          .root = 0,
          .embed = [&](int m) { return llama->embed(tokens(m)); },
          .nodes = [&](int l) { return llama->blocks()[l]->nodes(); },
          .head =
              [&](int m, const at::Tensor& h) {
                return llama->head(h, tokens(m).roll(1, 1)) / kMicrobatches;
              }};
      for (models::LlamaBlock& block : llama->blocks()) {
        pieces.layers.push_back(runtime->unit_of(*block));
      }
      runner = std::make_unique<OverlapRunner>(
          runtime,
          pieces,
          kMicrobatches,
          OverlapPlanOptions{
              .interleave = run.interleave,
              .delay_wgrad = run.delay,
              .recompute = run.recompute,
              .shared_experts = run.shared_experts > 0,
              .dense = {true, false, false}},
          streams);
    }
    for (; step < kSteps; ++step) {
      std::vector<at::Tensor> losses;
      if (runner) {
        losses = runner->run();
      }
      for (int m = 0; !runner && m < kMicrobatches; ++m) {
        runtime->set_is_last_microbatch(m + 1 == kMicrobatches);
        losses.push_back(
            llama(tokens(m), tokens(m).roll(1, 1)) / kMicrobatches);
        losses.back().backward();
      }
      optimizer.step(1e-3);
      optimizer.zero_grad();
      const std::lock_guard lock(mutex);
      for (int m = 0; m < kMicrobatches; ++m) {
        result.losses[{step, 10 * context.rank + m}] = losses[m].item<double>();
      }
    }
    collect_weights(*runtime, mutex, result.weights);
    if (context.rank == 0) {
      for (const models::RouterOf& of : llama->routers()) {
        const at::Tensor counts = of.router->take_load().counts;
        for (std::int64_t e = 0; e < counts.numel(); ++e) {
          result.counts.push_back(counts[e].item<std::int64_t>());
        }
      }
    }
  });
  return result;
}

void expect_same(const MoeOverlapResult& got, const MoeOverlapResult& want) {
  EXPECT_EQ(got.losses, want.losses);
  // A recompute does not count again, and a first run without a graph does.
  EXPECT_EQ(got.counts, want.counts);
  ASSERT_EQ(got.weights.size(), want.weights.size());
  for (const auto& [name, values] : want.weights) {
    EXPECT_TRUE(got.weights.at(name) == values) << name;
  }
}

TEST(OverlapMoe, EqualsPlainAccumulation) {
  const auto want = train_overlapped_moe({.with_runner = false});
  for (const bool recompute : {false, true}) {
    SCOPED_TRACE(recompute);
    expect_same(
        train_overlapped_moe({.delay = true, .recompute = recompute}),
        want);
  }
  expect_same(
      train_overlapped_moe({.strategy = "zero2", .delay = true}),
      train_overlapped_moe({.strategy = "zero2", .with_runner = false}));
}

// The model adds the shared experts' result and the residual in one product, a
// schedule's merge adds them one by one: the pieces' order is the reference.
TEST(OverlapMoe, SharedExpertsEqualThoseOneAfterTheOther) {
  expect_same(
      train_overlapped_moe(
          {.delay = true, .recompute = true, .shared_experts = 1}),
      train_overlapped_moe({.interleave = false, .shared_experts = 1}));
}

TEST(OverlapMoe, ABlockThatRecomputesItselfIsRefused) {
  models::Llama llama(
      models::ModelConfig{
          .dim = 32,
          .layers = 1,
          .heads = 4,
          .kv_heads = 2,
          .ffn_dim = 64,
          .vocab_size = kOverlapVocab,
          .max_seq_len = 16},
      models::LlamaOptions{
          .activation_checkpoint = models::ActivationCheckpoint::full});
  EXPECT_THROW(llama->blocks()[0]->nodes(), Error);
}

}  // namespace
}  // namespace flatshard::testing
