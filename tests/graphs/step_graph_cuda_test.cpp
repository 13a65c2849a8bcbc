// The full matrix of step_graph_test.cpp on GPUs, one rank for each; without a
// GPU it skips itself. With one GPU, scripts/share_gpu lets two ranks share it,
// and --gtest_filter='Pairs/*:*OnGpus*' leaves out the cases that add little.
#include "flatshard/device/graph.h"
#include "flatshard/device/memory.h"
#include "flatshard/device/stream.h"
#include "flatshard/device/stream_word.h"
#include "tests/graphs/graph_training.h"
#include "tests/support/gpu_ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard {
namespace {

using testing::gpu_ranks;
using testing::GraphCase;
using testing::GraphHooks;
using testing::GraphRun;
using testing::GraphTraining;

class StepGraphOnGpus : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU: CUDA graphs are not tested";
    }
  }
};
class StepGraphMatrix : public StepGraphOnGpus,
                        public ::testing::WithParamInterface<int> {};

GraphRun train(GraphCase c, bool graphs, const GraphHooks& hooks = {}) {
  static int meshes = 0;
  at::manual_seed(3);
  c.graphs = graphs;
  std::vector<MeshAxis> axes{{"dp", gpu_ranks().world()}};
  if (c.mesh.size() == 2) {
    axes = {{"outer", c.mesh[0]}, {"inner", c.mesh[1]}};
  }
  GraphTraining training(
      c,
      gpu_ranks().world() == 1
          ? Mesh::single(gpu_ranks().device)
          : gpu_ranks().mesh(axes, fmt::format("steps{}", meshes++)));
  return training.run(hooks);
}

void expect_equal(const GraphRun& eager, const GraphRun& graphs) {
  EXPECT_EQ(eager.losses, graphs.losses);
  ASSERT_EQ(eager.gradients.size(), graphs.gradients.size());
  for (std::size_t i = 0; i < eager.gradients.size(); ++i) {
    EXPECT_TRUE(at::equal(eager.gradients[i], graphs.gradients[i]))
        << "gradient " << i;
  }
}

TEST_F(StepGraphOnGpus, AGraphWritesNumbersForTheHost) {
  const at::Device device = gpu_ranks().device;
  const auto word = make_stream_word(device);
  word->write(1);
  current_stream(device)->synchronize();
  EXPECT_EQ(word->read(), 1U);
  const auto pool = make_graph_pool(device);
  EXPECT_FALSE(current_stream_records(device));
  const auto graph = pool->capture([&] {
    EXPECT_TRUE(current_stream_records(device));
    word->write(2);
    at::Tensor x = at::ones({4}, at::TensorOptions(device));
    word->write(3);
    return std::vector<at::Tensor>{x};
  });
  EXPECT_EQ(word->read(), 1U);
  for (int i = 0; i < 2; ++i) {
    graph->replay();
    current_stream(device)->synchronize();
    EXPECT_EQ(word->read(), 3U);
    word->write(1);
    current_stream(device)->synchronize();
  }
}

TEST_P(StepGraphMatrix, EqualsEagerBitForBit) {
  GraphCase c = testing::all_step_cases(gpu_ranks().world())[GetParam()];
  c.steps = gpu_ranks().world() == 1 ? 20 : 8;
  const GraphRun eager = train(c, false);
  const GraphRun graphs = train(c, true);
  expect_equal(eager, graphs);
  EXPECT_EQ(graphs.stats.captures, 1);
  EXPECT_EQ(graphs.stats.step_replays, c.steps - c.warmup_steps);
  EXPECT_THAT(graphs.stats.fallbacks, ::testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(
    Pairs,
    StepGraphMatrix,
    ::testing::ValuesIn(testing::pairwise_step_indices()),
    [](const auto& info) {
      return testing::all_step_cases(1)[info.param].name();
    });

INSTANTIATE_TEST_SUITE_P(
    All,
    StepGraphMatrix,
    ::testing::Range(0, static_cast<int>(testing::all_step_cases(1).size())),
    [](const auto& info) {
      return testing::all_step_cases(1)[info.param].name();
    });

// An evaluation between two steps uses the slots, streams and communicators
// that the graph uses, and a step of another shape runs between two replays.
TEST_F(StepGraphOnGpus, B55_EagerWorkBetweenReplays) {
  for (const char* strategy : {"zero1", "zero2", "zero3"}) {
    GraphCase c{.strategy = strategy, .steps = 12, .whole_step = true};
    const GraphHooks hooks{.before_step = [&](GraphTraining& t, int step) {
      if (step % 2 == 1 || step == c.warmup_steps) {  // also before the capture
        const at::NoGradGuard no_grad;
        t.forward(90, 0);
      }
      t.set_batch(step == 6 ? 3 : 2);
    }};
    const GraphRun eager = train(c, false, hooks);
    const GraphRun graphs = train(c, true, hooks);
    expect_equal(eager, graphs);
    EXPECT_EQ(graphs.stats.step_replays, c.steps - c.warmup_steps - 1);
    EXPECT_EQ(graphs.stats.fallbacks.size(), 1U);
  }
}

// The outer axis has a separate stream and communicator.
TEST_F(StepGraphOnGpus, Hsdp) {
  const int world = gpu_ranks().world();
  if (world % 2 != 0) {
    GTEST_SKIP() << "expected an even number of ranks";
  }
  const GraphCase c{
      .strategy = "hsdp",
      .mesh = {2, world / 2},
      .microbatches = 3,
      .steps = 12,
      .whole_step = true};
  const GraphRun eager = train(c, false);
  const GraphRun graphs = train(c, true);
  expect_equal(eager, graphs);
  EXPECT_EQ(graphs.stats.step_replays, c.steps - c.warmup_steps);
}

// The collectives are the same in the same order: NCCL runs them in a graph on
// one rank and without on another (NCCL_GRAPH_REGISTER=0).
TEST_F(StepGraphOnGpus, OneRankMayRunAStepEagerly) {
  const GraphCase c{.steps = 8, .whole_step = true};
  const GraphHooks hooks{.before_step = [](GraphTraining& t, int step) {
    t.set_batch(step == 5 && t.runtime().mesh()->rank() == 1 ? 3 : 2);
  }};
  const GraphRun eager = train(c, false, hooks);
  const GraphRun graphs = train(c, true, hooks);
  expect_equal(eager, graphs);
}

TEST_F(StepGraphOnGpus, GivesItsMemoryBack) {
  const GraphCase c{.steps = 5, .whole_step = true};
  const auto reserved = [] {
    make_graph_pool(gpu_ranks().device)->make_room();
    return memory_stats(gpu_ranks().device).reserved_bytes;
  };
  train(c, true);
  const std::int64_t before = reserved();
  const GraphRun run = train(c, true);
  EXPECT_GT(run.stats.nbytes, 0);
  EXPECT_EQ(reserved(), before);
}

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  return flatshard::testing::gpu_ranks_main(argc, argv);
}
