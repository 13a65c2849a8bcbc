// Two microbatches at once on GPUs: one rank per GPU, or two that share one
// (scripts/share_gpu). Delays on every stream, so that a wait that is missing
// shows. Without a GPU it skips itself.
#include "tests/overlap/overlap_moe.h"
#include "tests/support/gpu_ranks.h"

#include <ATen/Context.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

namespace flatshard::testing {
namespace {

class OverlapOnGpus : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU: two microbatches at once are not tested on one";
    }
    at::globalContext().setDeterministicAlgorithms(true, false);
  }
  void TearDown() override {
    at::globalContext().setDeterministicAlgorithms(false, false);
  }

  static MoeOverlapResult train(const MoeOverlapCase& c) {
    static int count = 0;
    std::mutex mutex;
    MoeOverlapResult result;
    train_overlapped_rank(
        c,
        gpu_ranks().mesh(c.axes(), fmt::format("{}", count++)),
        mutex,
        result);
    return result;
  }
  static int world() { return gpu_ranks().world(); }
};

TEST_F(OverlapOnGpus, EqualsPlainAccumulation) {
  if (8 % world() != 0) {
    GTEST_SKIP() << "expected 1, 2, 4 or 8 ranks, have " << world();
  }
  for (const char* strategy : {"zero1", "zero3"}) {
    for (const bool copies : {false, true}) {
      for (int bits = 0; bits < 8; ++bits) {
        MoeOverlapCase c{
            .strategy = strategy,
            .edp = 1,
            .ep = world(),
            .copies = copies && world() > 1,
            .exchanges_alone = true,
            .options = {
                .delay_wgrad = (bits & 1) != 0,
                .recompute = (bits & 2) != 0,
                .shared_experts = (bits & 4) != 0}};
        SCOPED_TRACE(c.name());
        const MoeOverlapResult got = train(c);
        c.with_runner = false;
        expect_same(got, train(c));
      }
    }
  }
}

// Each microbatch has graphs of its regions, and no recorded region runs
// eagerly.
TEST_F(OverlapOnGpus, GraphsGiveTheBitsOfEagerSteps) {
  if (8 % world() != 0) {
    GTEST_SKIP() << "expected 1, 2, 4 or 8 ranks, have " << world();
  }
  for (int bits = 0; bits < 4; ++bits) {
    MoeOverlapCase c{
        .edp = 1,
        .ep = world(),
        .exchanges_alone = true,
        .options = {
            .delay_wgrad = (bits & 1) != 0,
            .recompute = (bits & 2) != 0}};
    c.steps = 5;
    SCOPED_TRACE(c.name());
    const MoeOverlapResult eager = train(c);
    c.regions = {"attn", "mlp", "moe_router"};
    const MoeOverlapResult graphs = train(c);
    expect_same(graphs, eager);
    const GraphStats& stats = graphs.graphs.at(gpu_ranks().rank());
    EXPECT_EQ(
        stats.backward_replays,
        (c.steps - MoeOverlapCase::kWarmupSteps) * c.microbatches *
            (c.layers + c.layers));
    EXPECT_TRUE(stats.fallbacks.empty()) << stats.fallbacks.begin()->first;
  }
}

}  // namespace
}  // namespace flatshard::testing

int main(int argc, char** argv) {
  return flatshard::testing::gpu_ranks_main(argc, argv);
}
