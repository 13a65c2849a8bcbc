// The whole matrix of graph_test.cpp on GPUs, one rank for each; without a GPU
// it skips itself. With one GPU, scripts/share_gpu lets two ranks share it.
#include "flatshard/device/stream.h"
#include "tests/support/gpu_ranks.h"
#include "tests/unit/graph_training.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard {
namespace {

using testing::gpu_ranks;
using testing::GraphCase;
using testing::GraphRun;
using testing::GraphTraining;

class GraphMatrix : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU: CUDA graphs are not tested";
    }
  }
};

GraphRun train(const GraphCase& c, const std::string& name) {
  at::manual_seed(3);
  GraphTraining training(
      c,
      gpu_ranks().world() == 1
          ? Mesh::single(gpu_ranks().device)
          : gpu_ranks().mesh({{"dp", gpu_ranks().world()}}, name));
  return training.run();
}

TEST_P(GraphMatrix, EqualsEagerBitForBit) {
  GraphCase c = testing::all_graph_cases(gpu_ranks().world())[GetParam()];
  c.steps = 20;
  SCOPED_TRACE(c.name());
  const std::string name = fmt::format("graphs{}", GetParam());
  c.graphs = false;
  const GraphRun eager = train(c, name + "eager");
  c.graphs = true;
  c.audit = true;
  const GraphRun graphs = train(c, name);
  EXPECT_EQ(eager.losses, graphs.losses);
  ASSERT_EQ(eager.gradients.size(), graphs.gradients.size());
  for (std::size_t i = 0; i < eager.gradients.size(); ++i) {
    EXPECT_TRUE(at::equal(eager.gradients[i], graphs.gradients[i]))
        << "gradient " << i;
  }
  EXPECT_EQ(eager.actions, graphs.actions);
  const std::int64_t regions = (c.steps - c.warmup_steps) * c.microbatches *
                               GraphCase::kLayers *
                               static_cast<std::int64_t>(c.regions.size());
  const bool twice = c.recompute && !c.regions.contains("block");
  EXPECT_EQ(graphs.stats.forward_replays, regions * (twice ? 2 : 1));
  EXPECT_EQ(graphs.stats.backward_replays, regions);
  EXPECT_THAT(graphs.stats.fallbacks, ::testing::IsEmpty());
  EXPECT_GT(graphs.stats.audited_addresses, graphs.stats.captures);
}

INSTANTIATE_TEST_SUITE_P(
    All,
    GraphMatrix,
    ::testing::Range(0, static_cast<int>(testing::all_graph_cases(1).size())),
    [](const auto& info) {
      return testing::all_graph_cases(1)[info.param].name();
    });

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  return flatshard::testing::gpu_ranks_main(argc, argv);
}
