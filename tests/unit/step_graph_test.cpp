// Steps as one graph give the bits of eager training: losses and every
// gradient, with a replay in each step behind the warm-up. On CPUs a replay
// runs the recorded step again and puts the host back to where it was, so what
// a replay leaves on the host is what the capture kept.
#include "flatshard/core/error.h"
#include "tests/unit/graph_training.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard {
namespace {

using testing::GraphCase;
using testing::GraphHooks;
using testing::GraphRun;
using testing::GraphTraining;
using testing::train_graphs;

void expect_same_steps(const GraphRun& eager, const GraphRun& graphs) {
  EXPECT_EQ(eager.losses, graphs.losses);
  ASSERT_EQ(eager.gradients.size(), graphs.gradients.size());
  for (std::size_t i = 0; i < eager.gradients.size(); ++i) {
    EXPECT_TRUE(at::equal(eager.gradients[i], graphs.gradients[i]))
        << "gradient " << i;
  }
}

struct StepRuns {
  GraphRun eager;
  GraphRun graphs;
};

StepRuns train_both(GraphCase c, const GraphHooks& hooks = {}) {
  StepRuns runs;
  c.whole_step = true;
  c.graphs = false;
  runs.eager = train_graphs(c, hooks);
  c.graphs = true;
  runs.graphs = train_graphs(c, hooks);
  return runs;
}

void check_case(const GraphCase& c) {
  const StepRuns runs = train_both(c);
  expect_same_steps(runs.eager, runs.graphs);
  EXPECT_EQ(runs.eager.actions, runs.graphs.actions);
  EXPECT_EQ(runs.graphs.stats.captures, 1);
  EXPECT_EQ(runs.graphs.stats.step_replays, c.steps - c.warmup_steps);
  EXPECT_THAT(runs.graphs.stats.fallbacks, ::testing::IsEmpty());
}

class StepGraphParity : public ::testing::TestWithParam<GraphCase> {};

TEST_P(StepGraphParity, EqualsEagerBitForBit) {
  check_case(GetParam());
}

INSTANTIATE_TEST_SUITE_P(
    Pairwise,
    StepGraphParity,
    ::testing::ValuesIn(testing::pairwise_step_cases()),
    [](const auto& info) { return info.param.name(); });

// The whole matrix on one rank: build/tests/unit_step_graph_test
// --gtest_also_run_disabled_tests --gtest_filter='*WholeMatrix*'
TEST(StepGraphMatrix, DISABLED_WholeMatrix) {
  for (GraphCase c : testing::all_step_cases(1)) {
    SCOPED_TRACE(c.name());
    c.steps = 20;
    check_case(c);
  }
}

}  // namespace
}  // namespace flatshard
