// Ranks that share the tokens of a batch train as one rank does.
#include "tests/runtime/tensor_training.h"
#include "tests/support/case_name.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

namespace flatshard::testing {
namespace {

using models::ActivationCheckpoint;

class ContextParallelTraining : public ::testing::TestWithParam<TensorRun> {
 protected:
  /// Returns one for each reference.
  static const TensorResult& reference(const TensorRun& run) {
    static std::map<std::string, TensorResult> known;
    const TensorRun one = tensor_reference(run);
    const std::string key = one.name() + " " + std::to_string(one.batch);
    const auto found = known.find(key);
    return found != known.end() ? found->second
                                : known[key] = train_tensor(one);
  }
};

TEST_P(ContextParallelTraining, EqualsOneRank) {
  const TensorDistance distance =
      tensor_distance(train_tensor(GetParam()), reference(GetParam()));
  EXPECT_LE(distance.largest, tensor_tolerance(GetParam())) << distance.where;
}

INSTANTIATE_TEST_SUITE_P(
    Pairs,
    ContextParallelTraining,
    ::testing::Values(
        TensorRun{.strategy = "zero0", .cp = 2},
        TensorRun{.strategy = "zero1", .cp = 4, .documents = true},
        TensorRun{
            .strategy = "zero2",
            .dp = 2,
            .cp = 2,
            .microbatches = 2,
            .checkpoint = ActivationCheckpoint::full,
            .batch = 3,
            .documents = true},
        TensorRun{
            .strategy = "zero3",
            .cp = 2,
            .checkpoint = ActivationCheckpoint::full,
            .keep_attention = true,
            .mlp_chunk_tokens = 2,
            .one_target = true},
        TensorRun{
            .strategy = "zero3",
            .dp = 2,
            .cp = 4,
            .microbatches = 2,
            .checkpoint = ActivationCheckpoint::selective,
            .chunk_tokens = 2,
            .one_target = true},
        TensorRun{.cp = 2, .tp = 2, .documents = true},
        TensorRun{
            .strategy = "zero1",
            .dp = 2,
            .cp = 2,
            .tp = 2,
            .checkpoint = ActivationCheckpoint::full,
            .keep_attention = true},
        TensorRun{.model = "multi_query", .cp = 4, .batch = 2},
        TensorRun{
            .model = "multi_query",
            .dp = 2,
            .cp = 2,
            .checkpoint = ActivationCheckpoint::full,
            .documents = true},
        TensorRun{.strategy = "hsdp", .replicate = 2, .cp = 2},
        TensorRun{
            .strategy = "hfsdp",
            .replicate = 2,
            .dp = 2,
            .cp = 2,
            .documents = true},
        TensorRun{.model = "tied", .dp = 2, .cp = 2, .microbatches = 3},
        TensorRun{.model = "biases", .cp = 4, .batch = 3},
        TensorRun{.model = "head_norms", .cp = 4, .documents = true},
        TensorRun{.model = "projection_norms", .cp = 2, .tp = 2},
        TensorRun{
            .model = "gemma",
            .cp = 4,
            .checkpoint = ActivationCheckpoint::selective},
        TensorRun{.model = "gemma", .cp = 2, .tp = 2, .documents = true},
        TensorRun{.model = "sinks", .cp = 4, .documents = true},
        TensorRun{
            .model = "sinks",
            .dp = 2,
            .cp = 2,
            .ep = 2,
            .checkpoint = ActivationCheckpoint::full,
            .keep_attention = true},
        TensorRun{.model = "sinks", .cp = 2, .tp = 2, .microbatches = 2},
        // Ranks that share tokens have the same experts,
        TensorRun{.model = "experts", .dp = 2, .cp = 4, .ep = 2},
        TensorRun{
            .model = "experts",
            .strategy = "zero1",
            .dp = 2,
            .cp = 2,
            .etp = 2,
            .documents = true},
        // or others.
        TensorRun{.model = "experts", .strategy = "zero0", .cp = 2, .ep = 2},
        TensorRun{
            .model = "experts",
            .dp = 2,
            .cp = 2,
            .ep = 4,
            .microbatches = 2,
            .checkpoint = ActivationCheckpoint::full,
            .documents = true},
        TensorRun{
            .model = "experts",
            .strategy = "hsdp",
            .replicate = 2,
            .cp = 2,
            .ep = 2,
            .batch = 2},
        TensorRun{.model = "experts", .cp = 2, .tp = 2, .ep = 2},
        TensorRun{
            .model = "experts",
            .strategy = "zero2",
            .dp = 2,
            .cp = 2,
            .tp = 2,
            .ep = 2,
            .etp = 4,
            .microbatches = 2}),
    testing::kNumberedCaseName);

INSTANTIATE_TEST_SUITE_P(
    Hosts,
    ContextParallelTraining,
    ::testing::Values(
        TensorRun{.cp = 4, .hosts = 2},
        TensorRun{
            .strategy = "zero2",
            .cp = 2,
            .hosts = 2,
            .microbatches = 2,
            .checkpoint = ActivationCheckpoint::full,
            .keep_attention = true,
            .batch = 3,
            .documents = true},
        TensorRun{
            .dp = 2,
            .cp = 4,
            .hosts = 2,
            .checkpoint = ActivationCheckpoint::full,
            .mlp_chunk_tokens = 1,
            .one_target = true},
        TensorRun{.cp = 2, .hosts = 2, .tp = 2, .documents = true},
        TensorRun{.model = "multi_query", .cp = 4, .hosts = 2, .batch = 2},
        TensorRun{
            .model = "gemma",
            .cp = 4,
            .hosts = 2,
            .checkpoint = ActivationCheckpoint::selective},
        TensorRun{
            .model = "sinks",
            .dp = 2,
            .cp = 2,
            .hosts = 2,
            .ep = 2,
            .documents = true},
        TensorRun{
            .model = "dynamic_rope",
            .cp = 2,
            .hosts = 2,
            .documents = true},
        TensorRun{.model = "biases", .replicate = 2, .cp = 4, .hosts = 2}),
    testing::kNumberedCaseName);

// The second run of a part repeats its exchanges, and only these.
TEST(ContextParallelRecompute, KeptAttentionHasTheBitsOfRecomputedAttention) {
  for (const bool documents : {false, true}) {
    TensorRun run{
        .cp = 2,
        .hosts = documents ? 2 : 1,
        .microbatches = 2,
        .checkpoint = ActivationCheckpoint::full,
        .documents = documents};
    const TensorResult twice = train_tensor(run);
    run.keep_attention = true;
    const TensorResult once = train_tensor(run);
    EXPECT_EQ(once.losses, twice.losses);
    EXPECT_EQ(once.weights, twice.weights);
  }
}

// An exchange adds nothing, so copies have the bits of collectives.
TEST(ContextParallelCopies, HaveTheBitsOfCollectives) {
  for (TensorRun run :
       {TensorRun{.cp = 4, .microbatches = 2, .batch = 2, .documents = true},
        TensorRun{.cp = 4, .hosts = 2, .batch = 2, .documents = true},
        TensorRun{
            .model = "multi_query",
  .dp = 2,
  .cp = 2,
  .checkpoint = ActivationCheckpoint::full,
  .keep_attention = true},
        TensorRun{
            .model = "sinks",
  .dp = 2,
  .cp = 2,
  .ep = 2,
  .checkpoint = ActivationCheckpoint::selective}}) {
    const TensorResult collectives = train_tensor(run);
    run.copies = true;
    const TensorResult copies = train_tensor(run);
    EXPECT_EQ(copies.losses, collectives.losses) << run.name();
    EXPECT_EQ(copies.norms, collectives.norms) << run.name();
    EXPECT_EQ(copies.weights, collectives.weights) << run.name();
  }
}

// Ranks that are late by other times give bitwise identical results.
TEST(ContextParallelPitfalls, G8_SumsHaveOneOrder) {
  for (const int hosts : {1, 2}) {
    TensorRun run{.dp = 2, .cp = 4, .hosts = hosts, .batch = 8, .steps = 4};
    const TensorResult first = train_tensor(run);
    run.delay_seed = 40;
    const TensorResult second = train_tensor(run);
    EXPECT_EQ(second.losses, first.losses);
    EXPECT_EQ(second.norms, first.norms);
    EXPECT_EQ(second.weights, first.weights);
  }
}

TEST(ContextParallelPitfalls, G14_TokensHaveThePlacesOfTheirSequence) {
  for (const bool documents : {false, true}) {
    for (const TensorRun& run :
         {TensorRun{.cp = 4, .batch = 3, .documents = documents},
          TensorRun{.cp = 4, .hosts = 2, .batch = 3, .documents = documents},
          TensorRun{.model = "dynamic_rope", .cp = 2, .documents = documents},
          TensorRun{
              .model = "dynamic_rope",
    .cp = 2,
    .tp = 2,
    .batch = 2,
    .documents = documents}}) {
      const TensorDistance distance = tensor_distance(
          train_tensor(run),
          train_tensor(tensor_reference(run)));
      EXPECT_LE(distance.largest, tensor_tolerance(run))
          << run.name() << ": " << distance.where;
    }
  }
}

class ContextParallelGraphs : public ::testing::TestWithParam<TensorRun> {};

TEST_P(ContextParallelGraphs, EqualsEagerBitForBit) {
  TensorRun run = GetParam();
  run.steps = 6;
  run.max_norm = 0.1;  // the rate is 1
  run.graph_regions.clear();
  run.step_graph = false;
  const TensorResult eager = train_tensor(run);
  run.graph_regions = GetParam().graph_regions;
  run.step_graph = GetParam().step_graph;
  const TensorResult graphs = train_tensor(run);
  EXPECT_EQ(graphs.losses, eager.losses);
  EXPECT_EQ(graphs.norms, eager.norms);
  EXPECT_EQ(graphs.weights, eager.weights);
  for (const auto& [rank, stats] : graphs.graphs) {
    EXPECT_GT(stats.forward_replays + stats.step_replays, 0) << rank;
    EXPECT_THAT(stats.fallbacks, ::testing::IsEmpty()) << rank;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Grids,
    ContextParallelGraphs,
    ::testing::Values(
        TensorRun{.cp = 2, .graph_regions = {"attn"}},
        TensorRun{
            .dp = 2,
            .cp = 2,
            .microbatches = 2,
            .documents = true,
            .graph_regions = {"attn", "mlp"}},
        TensorRun{
            .cp = 2,
            .tp = 2,
            .checkpoint = ActivationCheckpoint::full,
            .graph_regions = {"block"}},
        TensorRun{.cp = 4, .hosts = 2, .graph_regions = {"attn"}},
        TensorRun{.cp = 2, .microbatches = 2, .step_graph = true}),
    testing::kNumberedCaseName);

}  // namespace
}  // namespace flatshard::testing
