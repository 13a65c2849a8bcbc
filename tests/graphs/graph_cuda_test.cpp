// The matrix of graph_test.cpp on GPUs, one rank for each; without a GPU it
// skips itself. Two ranks on one GPU, the pairwise part:
// scripts/share_gpu 2 build/tests/graphs_cuda_test
// --gtest_filter='Pairwise/*'
#include "flatshard/device/stream.h"
#include "tests/graphs/graph_training.h"
#include "tests/support/gpu_ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard {
namespace {

using testing::gpu_ranks;
using testing::GraphCase;
using testing::GraphRun;
using testing::GraphTraining;

class GraphMatrix : public ::testing::TestWithParam<GraphCase> {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU: CUDA graphs are not tested";
    }
  }
};

std::shared_ptr<Mesh> mesh_of(const GraphCase& c, const std::string& name) {
  const int world = gpu_ranks().world();
  if (c.mesh.size() == 2) {  // HSDP; one shard for each replica of two ranks
    const int replicas = std::min(world, 2);
    return gpu_ranks().mesh(
        {{"replica", replicas}, {"dp", world / replicas}},
        name);
  }
  return world == 1 ? Mesh::single(gpu_ranks().device)
                    : gpu_ranks().mesh({{"dp", world}}, name);
}

GraphRun train(const GraphCase& c, const std::string& name) {
  at::manual_seed(3);
  GraphTraining training(c, mesh_of(c, name));
  return training.run();
}

TEST_P(GraphMatrix, EqualsEagerBitForBit) {
  GraphCase c = GetParam();
  if (c.mesh.size() == 2 && gpu_ranks().world() % 2 != 0) {
    GTEST_SKIP() << "HSDP needs an even number of ranks";
  }
  c.steps = 20;
  SCOPED_TRACE(c.name());
  const auto* const info =
      ::testing::UnitTest::GetInstance()->current_test_info();
  const std::string name =
      fmt::format("{}{}", info->test_suite_name(), c.name());
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

std::string name_of(const ::testing::TestParamInfo<GraphCase>& info) {
  return info.param.name();
}

INSTANTIATE_TEST_SUITE_P(
    All,
    GraphMatrix,
    ::testing::ValuesIn(testing::all_graph_cases(1)),
    name_of);

INSTANTIATE_TEST_SUITE_P(
    Kept,
    GraphMatrix,
    ::testing::Values(
        GraphCase{.recompute = true, .keep_attention = true, .microbatches = 3},
        GraphCase{
            .recompute = true,
            .keep_attention = true,
            .float32_reduce = false,
            .bf16_compute = true}),
    name_of);

// Some of these, with each pair of values: what several ranks run.
INSTANTIATE_TEST_SUITE_P(
    Pairwise,
    GraphMatrix,
    ::testing::ValuesIn(testing::pairwise_graph_cases()),
    name_of);

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  return flatshard::testing::gpu_ranks_main(argc, argv);
}
