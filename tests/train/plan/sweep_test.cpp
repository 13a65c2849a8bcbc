#include "flatshard/train/plan/sweep.h"

#include "flatshard/plan/gpu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

namespace flatshard {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

PlannedMachines one_rank(const std::string& gpu) {
  return {.ranks = 1, .gpu = plan::find_gpu(gpu)};
}

Sweep sweep_of(
    const std::string& gpu,
    const std::vector<std::string>& overrides) {
  return sweep(config_of_preset("llama3_8b", overrides), one_rank(gpu));
}

std::set<StateFormat> formats_of(const std::vector<PlannedChoice>& choices) {
  std::set<StateFormat> formats;
  for (const PlannedChoice& planned : choices) {
    formats.insert(planned.choice.state_dtype);
  }
  return formats;
}

const std::string kNarrow = "precision.main_params=bfloat16";

// 192 GB have room for float32 states. Smaller ones have room for more.
TEST(Sweep, TriesSmallerStatesWithTheFastest) {
  const Sweep found = sweep_of("b200", {});
  EXPECT_THAT(
      formats_of(found.fitting),
      ElementsAre(
          StateFormat::float32,
          StateFormat::bfloat16,
          StateFormat::int8));
  EXPECT_THAT(
      to_string(found, one_rank("b200")),
      HasSubstr("FP8        states"));
}

TEST(Sweep, RecomputesAsManyBlocksAsTheConfig) {
  const Sweep found = sweep_of(
      "b200",
      {"activation_checkpoint.mode=full", "activation_checkpoint.layers=8"});
  EXPECT_THAT(
      to_string(found, one_rank("b200")),
      ::testing::AllOf(HasSubstr(" full:8 "), HasSubstr(" none ")));
  EXPECT_THAT(
      to_string(sweep_of("b200", {}), one_rank("b200")),
      Not(HasSubstr("full:")));
}

TEST(Sweep, TriesSmallerStatesWhereLargerOnesDoNotFit) {
  const Sweep found = sweep_of("h100", {kNarrow});
  EXPECT_THAT(
      formats_of(found.fitting),
      ElementsAre(StateFormat::bfloat16, StateFormat::int8));
  EXPECT_THAT(formats_of(found.too_large), Not(Contains(StateFormat::float32)));
}

TEST(Sweep, LeavesTheStatesOfTheConfigWhereTheyAreTheSmallest) {
  const Sweep int8 = sweep_of("h100", {kNarrow, "optimizer.state_dtype=int8"});
  EXPECT_THAT(formats_of(int8.fitting), ElementsAre(StateFormat::int8));
  const Sweep muon = sweep_of("h100", {"optimizer.name=muon"});
  EXPECT_THAT(muon.fitting, IsEmpty());
  EXPECT_THAT(formats_of(muon.too_large), ElementsAre(StateFormat::float32));
}

// Eight ranks share each sequence: experts are divided over all of them or not
// at all, and weights are sharded over all of them.
TEST(Sweep, DividesExpertsAndWeightsOverRanksThatShareSequences) {
  const Sweep found = sweep(
      config_of_preset(
          "qwen3_30b_a3b",
          {"model.layers=2", "parallelism.context_parallel_degree=8"}),
      {.ranks = 8, .gpu = plan::find_gpu("h200")});
  std::set<std::int64_t> degrees;
  std::set<std::string> strategies;
  bool kept = false;
  for (const PlannedChoice& planned : found.fitting) {
    if (planned.choice.tensor_degree == 1) {
      degrees.insert(planned.choice.expert_degree);
      strategies.insert(planned.choice.strategy);
      kept |= !planned.choice.reshard_after_forward;
    }
  }
  EXPECT_THAT(degrees, ElementsAre(1, 8));
  EXPECT_THAT(strategies, ElementsAre("zero0", "zero1", "zero2", "zero3"));
  EXPECT_TRUE(kept);
}

// Two hosts, each of eight ranks that share a sequence: one replica each.
TEST(Sweep, ReplicatesOverHostsWhoseRanksShareSequences) {
  const Sweep found = sweep(
      config_of_preset(
          "llama3_8b",
          {"model.layers=2", "parallelism.context_parallel_degree=8"}),
      {.ranks = 16, .gpu = plan::find_gpu("h200")});
  std::set<std::string> replicated;
  for (const PlannedChoice& planned : found.fitting) {
    if (planned.choice.replicas == 2) {
      replicated.insert(planned.choice.strategy);
    }
  }
  EXPECT_THAT(replicated, ElementsAre("hfsdp", "zero2", "zero3"));
}

TEST(Sweep, SaysWhyTheTrainerRefuses) {
  const Sweep found =
      sweep_of("h200", {"model.layers=2", "training.global_batch_size=3"});
  EXPECT_GT(found.num_refused(), 0);
  EXPECT_THAT(
      to_string(found, one_rank("h200")),
      HasSubstr(
          "\nwhat the trainer refuses\n    3  training.global_batch_size = 3 "
          "must be a multiple of"));
}

}  // namespace
}  // namespace flatshard
