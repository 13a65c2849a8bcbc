// Regions as graphs give the bits of eager training: losses and every gradient,
// with the replays that are expected and nothing that ran eagerly in their
// place. On CPUs a replay runs the captured function again; everything else is
// the same. With FLATSHARD_GRAPH_DEVICE=cuda the same cases run on a GPU.
#include "tests/unit/graph_training.h"

#include "flatshard/core/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard {
namespace {

using testing::GraphCase;
using testing::GraphRun;
using testing::train_graphs;

void expect_same(const GraphRun& eager, const GraphRun& graphs) {
  ASSERT_EQ(eager.losses.size(), graphs.losses.size());
  for (std::size_t i = 0; i < eager.losses.size(); ++i) {
    EXPECT_EQ(eager.losses[i], graphs.losses[i]) << "loss of step " << i;
  }
  ASSERT_EQ(eager.gradients.size(), graphs.gradients.size());
  for (std::size_t i = 0; i < eager.gradients.size(); ++i) {
    EXPECT_TRUE(at::equal(eager.gradients[i], graphs.gradients[i]))
        << "gradient " << i;
  }
}

void expect_replays(const GraphCase& c, const GraphRun& run) {
  const std::int64_t steps = c.steps - c.warmup_steps;
  const std::int64_t regions = steps * c.microbatches * GraphCase::kLayers *
                               static_cast<std::int64_t>(c.regions.size());
  const bool twice = c.recompute && !c.regions.contains("block");
  EXPECT_EQ(run.stats.forward_replays, regions * (twice ? 2 : 1));
  EXPECT_EQ(run.stats.backward_replays, regions);
  EXPECT_THAT(run.stats.fallbacks, ::testing::IsEmpty());
}

class GraphParity : public ::testing::TestWithParam<GraphCase> {};

TEST_P(GraphParity, EqualsEagerBitForBit) {
  GraphCase c = GetParam();
  c.graphs = false;
  const GraphRun eager = train_graphs(c);
  c.graphs = true;
  const GraphRun graphs = train_graphs(c);
  expect_same(eager, graphs);
  expect_replays(c, graphs);
}

TEST_P(GraphParity, LaunchesTheSameActions) {
  GraphCase c = GetParam();
  c.steps = 4;
  c.graphs = false;
  const std::string eager = train_graphs(c).actions;
  c.graphs = true;
  EXPECT_EQ(train_graphs(c).actions, eager);
}

// The whole matrix on one rank: build/tests/unit_graph_test
// --gtest_also_run_disabled_tests --gtest_filter='*WholeMatrix*'
TEST(GraphMatrix, DISABLED_WholeMatrix) {
  for (GraphCase c : testing::all_graph_cases(1)) {
    SCOPED_TRACE(c.name());
    c.graphs = false;
    const GraphRun eager = train_graphs(c);
    c.graphs = true;
    const GraphRun graphs = train_graphs(c);
    expect_same(eager, graphs);
    expect_replays(c, graphs);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Pairwise,
    GraphParity,
    ::testing::ValuesIn(testing::pairwise_graph_cases()),
    [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace flatshard
