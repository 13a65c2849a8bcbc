// Ranks that share layers, with regions as graphs: the bits of eager training,
// with the replays that are expected and nothing that ran eagerly in their
// place.
#include "tests/runtime/tensor_training.h"
#include "tests/support/counted_operation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace flatshard::testing {
namespace {

constexpr int kGraphSteps = 20;
constexpr std::int64_t kGraphLayers = 2;

class TensorParallelGraphs : public ::testing::TestWithParam<TensorRun> {};

// Returns the regions of a layer with and without experts: `experts` has one of
// each. Its router and its shared experts are `moe_router`. The order of rows,
// `moe_preprocess`, has no gradient and is not run again.
std::int64_t regions_of(const TensorRun& run) {
  std::int64_t regions = 0;
  for (const std::string& name : run.graph_regions) {
    const bool is_of_one_layer = run.model == "experts" && name != "attn";
    regions += name == "moe_router" ? 2 : is_of_one_layer ? 1 : kGraphLayers;
  }
  return regions;
}

TEST_P(TensorParallelGraphs, EqualsEagerBitForBit) {
  TensorRun run = GetParam();
  run.steps = kGraphSteps;
  run.max_norm = 0.1;  // the rate is 1
  run.graph_regions.clear();
  const TensorResult eager = train_tensor(run);
  run.graph_regions = GetParam().graph_regions;
  const TensorResult graphs = train_tensor(run);
  EXPECT_EQ(graphs.losses, eager.losses);
  EXPECT_EQ(graphs.norms, eager.norms);
  EXPECT_EQ(graphs.weights, eager.weights);
  const std::int64_t without_gradient =
      run.graph_regions.contains("moe_preprocess") ? 1 : 0;
  const bool twice = run.checkpoint == models::ActivationCheckpoint::selective;
  const std::int64_t each =
      (kGraphSteps - TensorRun::kWarmupSteps) * run.microbatches;
  const std::int64_t replays = each * (regions_of(run) - without_gradient);
  ASSERT_EQ(graphs.graphs.size(), static_cast<std::size_t>(run.world()));
  for (const auto& [rank, stats] : graphs.graphs) {
    SCOPED_TRACE(rank);
    EXPECT_EQ(
        stats.forward_replays,
        replays * (twice ? 2 : 1) + each * without_gradient);
    EXPECT_EQ(stats.backward_replays, replays);
    EXPECT_THAT(stats.fallbacks, ::testing::IsEmpty());
  }
}

INSTANTIATE_TEST_SUITE_P(
    Grids,
    TensorParallelGraphs,
    ::testing::Values(
        TensorRun{.model = "experts", .tp = 2, .graph_regions = {"attn"}},
        TensorRun{
            .model = "experts",
            .dp = 2,
            .tp = 2,
            .graph_regions = {"attn", "moe_router", "moe_preprocess"}},
        TensorRun{
            .model = "experts",
            .dp = 2,
            .tp = 2,
            .microbatches = 2,
            .graph_regions = {"moe_router"}},
        TensorRun{
            .model = "experts",
            .dp = 4,
            .ep = 2,
            .etp = 2,
            .graph_regions = {"attn"}},
        TensorRun{
            .model = "experts",
            .dp = 4,
            .ep = 2,
            .etp = 2,
            .graph_regions = {"attn", "moe_router", "moe_preprocess"}},
        TensorRun{
            .model = "experts",
            .dp = 4,
            .ep = 2,
            .etp = 2,
            .microbatches = 2,
            .graph_regions = {"moe_router"}},
        TensorRun{.dp = 2, .tp = 2, .graph_regions = {"block"}},
        TensorRun{
            .model = "biases",
            .tp = 2,
            .microbatches = 2,
            .graph_regions = {"attn", "mlp"}},
        TensorRun{
            .model = "projection_norms",
            .tp = 2,
            .checkpoint = models::ActivationCheckpoint::full,
            .graph_regions = {"block"}}),
    [](const auto& info) {
      std::string name = info.param.name();
      for (const std::string& region : info.param.graph_regions) {
        name += "_" + region;
      }
      return name;
    });

// Three more steps have as many matmuls: a second run makes no result of its
// part in a graph either, and ranks that replay exchange as the others do.
TEST(TensorParallelRegions, L9_RunTheMatmulsOfEagerSteps) {
  for (TensorRun run :
       {TensorRun{
            .tp = 2,
 .checkpoint = models::ActivationCheckpoint::full,
 .graph_regions = {"block"}},
        TensorRun{
            .tp = 2,
  .checkpoint = models::ActivationCheckpoint::selective,
  .graph_regions = {"attn", "mlp"}},
        TensorRun{
            .model = "experts",
  .tp = 2,
  .checkpoint = models::ActivationCheckpoint::full,
  .graph_regions = {"attn", "moe_router"}}}) {
    SCOPED_TRACE(run.name());
    const auto regions = run.graph_regions;
    const auto of_steps = [&](int steps, bool in_graphs) {
      run.steps = steps;
      run.graph_regions = in_graphs ? regions : std::set<std::string>();
      testing::CountedOperation counted("aten::mm");
      train_tensor(run);
      return counted.take();
    };
    const auto of_three = [&](bool in_graphs) {
      return of_steps(kGraphSteps + 3, in_graphs) -
             of_steps(kGraphSteps, in_graphs);
    };
    EXPECT_EQ(of_three(true), of_three(false));
  }
}

TEST(TensorParallelStepGraph, EqualsEagerBitForBit) {
  for (TensorRun run :
       {TensorRun{.tp = 2},
        TensorRun{
            .model = "tied",
  .dp = 2,
  .tp = 2,
  .microbatches = 2,
  .checkpoint = models::ActivationCheckpoint::full},
        TensorRun{
            .model = "biases",
  .strategy = "zero1",
  .dp = 2,
  .tp = 2,
  .microbatches = 2,
  .chunk_tokens = 5}}) {
    SCOPED_TRACE(run.name());
    run.steps = kGraphSteps;
    run.max_norm = 0.1;  // the rate is 1
    const TensorResult eager = train_tensor(run);
    run.step_graph = true;
    const TensorResult graphs = train_tensor(run);
    EXPECT_EQ(graphs.losses, eager.losses);
    EXPECT_EQ(graphs.norms, eager.norms);
    EXPECT_EQ(graphs.weights, eager.weights);
    for (const auto& [rank, stats] : graphs.graphs) {
      EXPECT_EQ(stats.captures, 1);
      EXPECT_EQ(stats.step_replays, kGraphSteps - TensorRun::kWarmupSteps);
      EXPECT_THAT(stats.fallbacks, ::testing::IsEmpty());
    }
  }
}

}  // namespace
}  // namespace flatshard::testing
