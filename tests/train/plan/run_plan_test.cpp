#include "flatshard/train/plan/run_plan.h"

#include "flatshard/plan/gpu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

namespace flatshard {
namespace {

using ::testing::HasSubstr;

constexpr const char* kSends = "weights.send=http://127.0.0.1:30000";

PlannedMachines machines() {
  return {.ranks = 8, .gpu = plan::find_gpu("h200")};
}

/// Returns the plan of Llama-3-8B.
RunPlan plan_with(const std::vector<std::string>& overrides) {
  return plan_run(config_of_preset("llama3_8b", overrides), machines());
}

/// Returns a step of Llama-3-8B with long sequences and full recompute.
plan::StepPlan step_with(std::vector<std::string> overrides) {
  for (const char* set :
       {"model.max_seq_len=32768",
        "training.seq_len=32768",
        "activation_checkpoint.mode=full"}) {
    overrides.emplace_back(set);
  }
  return plan_with(overrides).estimate.step;
}

TEST(RunPlan, OverlapHidesCopiesOfStates) {
  const double plain = step_with({}).seconds;
  const double offloaded = step_with({"optimizer.offload_states=true"}).seconds;
  const double hidden =
      step_with({"optimizer.offload_states=true", "optimizer.overlap=true"})
          .seconds;
  EXPECT_GT(offloaded, plain + 0.1);
  EXPECT_LT(hidden, plain + 0.05);
}

TEST(RunPlan, SmallChunksOfTokensTakeTime) {
  const plan::StepPlan whole = step_with({});
  for (const std::string key : {"mlp_chunk_tokens", "loss_chunk_tokens"}) {
    const auto with = [&](const std::string& tokens) {
      return step_with({"activation_checkpoint." + key + "=" + tokens});
    };
    EXPECT_LT(with("8192").seconds, 1.1 * whole.seconds) << key;
    EXPECT_GT(with("1").seconds, 2 * whole.seconds) << key;
    EXPECT_GT(with("1").host_seconds, 20 * whole.host_seconds) << key;
  }
}

// Half of the blocks need half of the time of a recompute, and their
// activations half of the memory.
TEST(RunPlan, SomeBlocksAreRecomputed) {
  const auto with = [](const char* key, const std::string& value) {
    const std::string set = std::string("activation_checkpoint.") + key + "=";
    return step_with({set + value, "training.seq_len=8192"});
  };
  const plan::StepPlan all = with("layers", "32");
  EXPECT_EQ(all.seconds, step_with({"training.seq_len=8192"}).seconds);
  const plan::StepPlan half = with("layers", "16");
  const plan::StepPlan one = with("layers", "1");
  const double of_block = (all.seconds - one.seconds) / 31;
  EXPECT_GT(of_block, 0.001);
  EXPECT_NEAR(half.seconds, one.seconds + 15 * of_block, 0.01 * all.seconds);
  const std::int64_t stored = one.activation_nbytes - all.activation_nbytes;
  EXPECT_GT(stored, std::int64_t{10} << 30);
  EXPECT_NEAR(
      static_cast<double>(half.activation_nbytes - all.activation_nbytes),
      16.0 / 31 * static_cast<double>(stored),
      0.05 * static_cast<double>(stored));
}

// 8B on 8 ranks, in bfloat16: rank 0 has the last block, the head with the last
// norm, and a bucket of the size of the largest tensor.
TEST(RunPlan, ASendCountsTwoUnitsAndABucket) {
  constexpr std::int64_t kHead = 2 * 128256 * 4096;
  constexpr std::int64_t kNorm = 2 * 4096;
  constexpr std::int64_t kBlock =
      2 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096) + 2 * kNorm;
  const RunPlan whole = plan_with({kSends});
  EXPECT_EQ(whole.job.send_nbytes, kBlock + kHead + kNorm + kHead);
  EXPECT_THAT(
      to_string(whole, machines(), std::nullopt),
      HasSubstr("send of weights"));
  // Full compute weights are of no use: main weights are sent, and sharded.
  EXPECT_EQ(
      plan_with({kSends,
                 "parallelism.strategy=zero2",
                 "precision.main_params=bfloat16"})
          .job.send_nbytes,
      whole.job.send_nbytes);
  // It has an eighth of the embedding and assembles it, while the two norms of
  // the first block are all-gathered. The embedding has the size of the head.
  const std::string shared = "parallelism.tensor_parallel_degree=8";
  EXPECT_EQ(
      plan_with({kSends, shared}).job.send_nbytes,
      kHead / 8 + kHead + 2 * kNorm + kHead);
}

TEST(RunPlan, ASendIsThePeakOfSmallSteps) {
  const auto added = [](const std::string& seq_len) {
    const std::vector<std::string> step{
        "training.seq_len=" + seq_len,
        "activation_checkpoint.mode=full"};
    std::vector<std::string> sends = step;
    sends.emplace_back(kSends);
    return plan_with(sends).estimate.peak_nbytes -
           plan_with(step).estimate.peak_nbytes;
  };
  EXPECT_EQ(added("8192"), 0);
  EXPECT_GT(added("128"), 0);
}

}  // namespace
}  // namespace flatshard
