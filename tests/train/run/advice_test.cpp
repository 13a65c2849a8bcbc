#include "flatshard/train/run/advice.h"

#include "flatshard/train/run/from_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::int64_t kGB = std::int64_t{1} << 30;
constexpr std::int64_t kBfloat16 = 2;  ///< bytes

std::string advice_for(
    const Config& config,
    std::int64_t table_nbytes = 0,
    std::int64_t capacity_nbytes = 0) {
  const models::ModelConfig model = models::preset("llama3_8b");
  return advice(
      run_options(config, model).advice,
      table_nbytes,
      capacity_nbytes);
}

TEST(Advice, ShortRunsGetNone) {
  Config config;
  config.training.steps = 500;
  EXPECT_EQ(advice_for(config), "");
}

TEST(Advice, LongRunsHearOfWarmUpAndCheckpoints) {
  Config config;
  config.training.steps = 501;
  EXPECT_EQ(
      advice_for(config),
      "advice for 501 steps: the learning rate has no warm-up "
      "(lr_scheduler.warmup_steps); no checkpoint is saved, so a failure loses "
      "all (checkpoint.interval)");
  config.lr_scheduler.warmup_steps = 10;
  EXPECT_THAT(
      advice_for(config),
      AllOf(Not(HasSubstr("warm-up")), HasSubstr("checkpoint.interval")));
  config.checkpoint.interval = 200;
  EXPECT_EQ(advice_for(config), "");
}

TEST(Advice, ManyCheckpointsThatAreAllKept) {
  Config config;
  config.training.steps = 100000;
  config.lr_scheduler.warmup_steps = 10;
  config.checkpoint.interval = 1000;
  // 8.03 billion parameters, each with three float32 values.
  EXPECT_EQ(
      advice_for(config),
      "advice for 100,000 steps: all 100 checkpoints of about 90 GiB are kept "
      "(checkpoint.keep_latest_k)");
  config.checkpoint.keep_latest_k = 2;
  EXPECT_EQ(advice_for(config), "");
}

TEST(Advice, MemoryThatComesNearTheGpus) {
  Config config;
  config.training.steps = 1;
  config.training.seq_len = 8192;
  // docs/dev/bench_log.md: the forward of this shape adds 25.1 GiB.
  EXPECT_NEAR(
      static_cast<double>(
          activation_nbytes(models::preset("llama3_8b"), 8192, kBfloat16)) /
          kGB,
      25.1,
      0.05);
  EXPECT_EQ(advice_for(config, 20 * kGB, 80 * kGB), "");
  EXPECT_THAT(
      advice_for(config, 50 * kGB, 80 * kGB),
      AllOf(
          HasSubstr("the table's 50.0 GiB and about 25.1 GiB of activations"),
          HasSubstr("the GPU's 80.0 GiB; activation_checkpoint.mode")));
  config.activation_checkpoint.mode = models::ActivationCheckpoint::full;
  EXPECT_EQ(advice_for(config, 50 * kGB, 80 * kGB), "");
  EXPECT_THAT(
      advice_for(config, 75 * kGB, 80 * kGB),
      HasSubstr("the table needs 75.0 of the GPU's 80.0 GiB; use more ranks"));
  // The memory size of a CPU is unknown.
  EXPECT_EQ(advice_for(config, 75 * kGB, 0), "");
}

TEST(Advice, ExpertsCountWhereATokenGoes) {
  models::ModelConfig model = models::preset("mixtral_8x7b");
  const std::int64_t two = activation_nbytes(model, 2048, kBfloat16);
  model.moe.experts_per_token = 3;
  model.validate();
  const std::int64_t ffn = model.moe.ffn_dim;
  EXPECT_EQ(
      activation_nbytes(model, 2048, kBfloat16) - two,
      model.layers * (2 * ffn + model.dim) * 2 * 2048);
}

TEST(Advice, NormsBehindPartsAndOfQueriesKeepTheirInputs) {
  models::ModelConfig model = models::preset("llama3_8b");
  const std::int64_t plain = activation_nbytes(model, 2048, kBfloat16);
  model.block.norms = models::NormPlacement::both;
  model.block.attention.qk_norm = models::QkNorm::head;
  EXPECT_EQ(
      activation_nbytes(model, 2048, kBfloat16) - plain,
      model.layers * (2 * 4096 + 4096 + 1024) * 2 * 2048);
}

}  // namespace
}  // namespace flatshard
