// Ranks that share layers, on GPUs: one rank per GPU, or two that share one
// (scripts/share_gpu), against one rank. Without a GPU it skips itself.
#include "tests/runtime/tensor_training.h"
#include "tests/support/gpu_ranks.h"

#include <ATen/Context.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

namespace flatshard::testing {
namespace {

using models::ActivationCheckpoint;

class TensorParallelOnGpus : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU: tensor parallelism on GPUs is not tested";
    }
    at::globalContext().setDeterministicAlgorithms(true, false);
    at::globalContext().setAllowTF32CuBLAS(false);
  }
  void TearDown() override {
    at::globalContext().setDeterministicAlgorithms(false, false);
  }

  static TensorResult train(const TensorRun& run) {
    std::mutex mutex;
    TensorResult result;
    static int count = 0;
    const auto mesh =
        run.world() == 1
            ? Mesh::single(gpu_ranks().device)
            : gpu_ranks().mesh(run.axes(), fmt::format("{}", count++));
    train_tensor_rank(run, mesh, mutex, result);
    return result;
  }

  // Compares the values of this rank with `want`, the values of all ranks.
  static void expect_near_reference(const TensorRun& run) {
    const TensorResult got = train(run);
    const TensorResult want = train(tensor_reference(run));
    const double tolerance = tensor_tolerance(run);
    EXPECT_FALSE(got.losses.empty());
    for (const auto& [key, loss] : got.losses) {
      EXPECT_NEAR(loss, want.losses.at(key), tolerance);
    }
    for (const auto& [key, norm] : got.norms) {
      const double expected = want.norms.at({key.first, 0});
      EXPECT_NEAR(norm, expected, tolerance * expected);
    }
    std::int64_t owned = 0;
    for (const auto& [name, values] : got.weights) {
      const auto& other = want.weights.at(name);
      ASSERT_EQ(values.size(), other.size()) << name;
      double largest = 0;
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (!std::isnan(values[i])) {
          largest =
              std::max(largest, std::abs(double{values[i]} - other.at(i)));
          ++owned;
        }
      }
      EXPECT_LE(largest, tolerance) << name;
    }
    EXPECT_GT(owned, 0);
  }

  static void expect_same_bits(
      const TensorResult& got,
      const TensorResult& want) {
    EXPECT_EQ(got.losses, want.losses);
    EXPECT_EQ(got.norms, want.norms);
    for (const auto& [name, values] : want.weights) {
      // NaN marks the values of other ranks.
      EXPECT_EQ(
          std::memcmp(
              got.weights.at(name).data(),
              values.data(),
              values.size() * sizeof(float)),
          0)
          << name;
    }
  }
};

TEST_F(TensorParallelOnGpus, RanksThatShareLayersEqualOne) {
  const int world = gpu_ranks().world();
  if (world != 2 && world != 4 && world != 8) {
    GTEST_SKIP() << "expected 2, 4 or 8 ranks, have " << world;
  }
  for (const int tp : {2, 4}) {
    if (world % tp != 0) {
      continue;
    }
    for (const std::string& model : tensor_models()) {
      for (const char* strategy : {"zero0", "zero2", "zero3"}) {
        for (const auto checkpoint :
             {ActivationCheckpoint::none, ActivationCheckpoint::full}) {
          const TensorRun run{
              .model = model,
              .strategy = strategy,
              .dp = world / tp,
              .tp = tp,
              .microbatches = 2,
              .checkpoint = checkpoint,
              .chunk_tokens = checkpoint == ActivationCheckpoint::full ? 5 : 0};
          SCOPED_TRACE(run.name());
          expect_near_reference(run);
        }
      }
    }
  }
}

TEST_F(TensorParallelOnGpus, RanksThatCopyEqualOne) {
  const int world = gpu_ranks().world();
  if (world != 2 && world != 4 && world != 8) {
    GTEST_SKIP() << "expected 2, 4 or 8 ranks, have " << world;
  }
  std::vector<TensorRun> runs{
      {.strategy = "zero0", .steps = 20},
      {.model = "biases", .strategy = "zero1", .microbatches = 2},
      {.model = "tied",
       .strategy = "zero2",
       .checkpoint = ActivationCheckpoint::selective,
       .chunk_tokens = 5},
      {.model = "gemma", .checkpoint = ActivationCheckpoint::full},
      {.model = "experts", .microbatches = 2}};
  for (TensorRun& run : runs) {
    for (const int tp : {2, 4}) {
      if (world % tp != 0) {
        continue;
      }
      run.dp = world / tp;
      run.tp = tp;
      run.copies = true;
      run.max_norm = 0.1;  // the rate is 1
      SCOPED_TRACE(run.name());
      expect_near_reference(run);
    }
  }
}

// The collectives of layers are in the graphs.
TEST_F(TensorParallelOnGpus, GraphsOfRegionsEqualEager) {
  const int world = gpu_ranks().world();
  if (world % 2 != 0) {
    GTEST_SKIP() << "expected an even number of ranks, have " << world;
  }
  const std::vector<TensorRun> runs{
      {.graph_regions = {"block"}},
      {.model = "biases", .graph_regions = {"attn", "mlp"}},
      {.model = "experts", .graph_regions = {"attn", "moe_router"}},
      {.model = "experts", .graph_regions = {"moe_router"}},
      {.checkpoint = ActivationCheckpoint::full, .graph_regions = {"block"}}};
  for (TensorRun run : runs) {
    run.dp = world / 2;
    run.tp = 2;
    run.microbatches = 2;
    run.steps = 20;
    run.max_norm = 0.1;  // the rate is 1
    SCOPED_TRACE(run.name() + " " + *run.graph_regions.begin());
    const TensorResult graphs = train(run);
    run.graph_regions.clear();
    expect_same_bits(graphs, train(run));
    for (const auto& [rank, stats] : graphs.graphs) {
      EXPECT_GT(stats.forward_replays, 0);
      EXPECT_GT(stats.backward_replays, 0);
      EXPECT_TRUE(stats.fallbacks.empty()) << stats.fallbacks.begin()->first;
    }
  }
}

// Copies to pinned memory and back, on their streams.
TEST_F(TensorParallelOnGpus, ActivationOffloadIsBitwiseIdentical) {
  const int world = gpu_ranks().world();
  for (TensorRun run :
       {TensorRun{
            .microbatches = 2,
 .checkpoint = ActivationCheckpoint::full,
 .keep_attention = true,
 .mlp_chunk_tokens = 2},
        TensorRun{
            .strategy = "zero1",
  .checkpoint = ActivationCheckpoint::selective},
        TensorRun{
            .model = "experts",
  .checkpoint = ActivationCheckpoint::full}}) {
    run.tp = world % 2 == 0 ? 2 : 1;
    run.dp = world / run.tp;
    run.steps = 20;
    run.max_norm = 0.1;  // the rate is 1
    SCOPED_TRACE(run.name());
    const TensorResult want = train(run);
    run.offload = true;
    const TensorResult got = train(run);
    expect_same_bits(got, want);
    EXPECT_GT(got.host_nbytes, 0);
  }
}

// So do graphs of the whole step, on compute's stream and on their own.
TEST_F(TensorParallelOnGpus, AGraphOfTheStepEqualsEager) {
  const int world = gpu_ranks().world();
  if (world % 2 != 0) {
    GTEST_SKIP() << "expected an even number of ranks, have " << world;
  }
  for (TensorRun run :
       {TensorRun{},
        TensorRun{.model = "tied", .microbatches = 2},
        TensorRun{.model = "biases", .strategy = "zero1", .chunk_tokens = 5},
        TensorRun{
            .model = "head_norms",
  .microbatches = 2,
  .checkpoint = ActivationCheckpoint::full}}) {
    run.dp = world / 2;
    run.tp = 2;
    run.steps = 20;
    run.max_norm = 0.1;  // the rate is 1
    SCOPED_TRACE(run.name());
    const TensorResult eager = train(run);
    run.step_graph = true;
    const TensorResult graphs = train(run);
    expect_same_bits(graphs, eager);
    for (const auto& [rank, stats] : graphs.graphs) {
      EXPECT_EQ(stats.captures, 1);
      EXPECT_EQ(stats.step_replays, run.steps - TensorRun::kWarmupSteps);
      EXPECT_TRUE(stats.fallbacks.empty()) << stats.fallbacks.begin()->first;
    }
  }
}

// Losses of logits that are small at first.
TEST_F(TensorParallelOnGpus, Float8IsNearOneRank) {
  const int world = gpu_ranks().world();
  if (world % 2 != 0) {
    GTEST_SKIP() << "expected an even number of ranks, have " << world;
  }
  for (const Float8Format& format :
       {Float8Format{.recipe = float8::Recipe::tensorwise},
        Float8Format{.recipe = float8::Recipe::rowwise},
        Float8Format{.recipe = float8::Recipe::rowwise, .stored_columns = true},
        Float8Format{.recipe = float8::Recipe::blockwise},
        Float8Format{.recipe = float8::Recipe::mxfp8, .emulate = true}}) {
    const TensorRun run{
        .model = "wide",
        .dp = world / 2,
        .tp = 2,
        .precision = Precision(),
        .float8 = format};
    SCOPED_TRACE(float8::to_string(format.recipe));
    const TensorResult got = train(run);
    const TensorResult want = train(tensor_reference(run));
    EXPECT_FALSE(got.losses.empty());
    for (const auto& [key, loss] : got.losses) {
      EXPECT_NEAR(loss, want.losses.at(key), 0.05);
    }
  }
}

TEST_F(TensorParallelOnGpus, RanksThatCutExpertsEqualOne) {
  const int world = gpu_ranks().world();
  if (world != 2 && world != 4) {
    GTEST_SKIP() << "expected 2 or 4 ranks, have " << world;
  }
  std::vector<TensorRun> runs{
      {.dp = world, .etp = 2},
      {.strategy = "zero1",
       .dp = world,
       .etp = world,
       .microbatches = 2,
       .checkpoint = ActivationCheckpoint::full,
       .steps = 1,
       .capacity_factor = 1},
      {.dp = world / 2, .tp = 2, .etp = 2}};
  if (world == 4) {
    runs.push_back({.dp = 4, .ep = 2, .etp = 2});
    runs.push_back({.dp = 2, .tp = 2, .ep = 2, .etp = 2});
  }
  for (TensorRun& run : runs) {
    run.model = "experts";
    SCOPED_TRACE(run.name());
    expect_near_reference(run);
  }
}

class ContextParallelOnGpus : public TensorParallelOnGpus {
 protected:
  void SetUp() override {
    TensorParallelOnGpus::SetUp();
    if (!IsSkipped() && gpu_ranks().world() % 2 != 0) {
      GTEST_SKIP() << "expected an even number of ranks, have "
                   << gpu_ranks().world();
    }
  }

  static std::vector<TensorRun> runs() {
    std::vector<TensorRun> runs{
        {.strategy = "zero0", .microbatches = 2},
        {.batch = 2, .documents = true},
        {.model = "multi_query",
         .strategy = "zero2",
         .checkpoint = ActivationCheckpoint::full,
         .keep_attention = true,
         .one_target = true},
        {.model = "gemma", .checkpoint = ActivationCheckpoint::selective},
        {.model = "sinks", .microbatches = 2, .documents = true},
        // Heads and tokens are exchanged between the same ranks.
        {.model = "sinks", .ep = 2, .microbatches = 2}};
    for (TensorRun& run : runs) {
      run.dp = gpu_ranks().world() / 2;
      run.cp = 2;
      run.max_norm = 0.1;  // the rate is 1
    }
    return runs;
  }
};

TEST_F(ContextParallelOnGpus, RanksThatShareTokensEqualOne) {
  for (TensorRun run : runs()) {
    for (const bool copies : {false, true}) {
      run.copies = copies;
      SCOPED_TRACE(run.name());
      expect_near_reference(run);
    }
    run.copies = false;
    run.hosts = 2;
    SCOPED_TRACE(run.name());
    expect_near_reference(run);
  }
}

// In 16 bits FlashAttention reads the heads that arrive.
TEST_F(ContextParallelOnGpus, CopiesHaveTheBitsOfCollectives) {
  std::vector<TensorRun> all = runs();
  for (const bool documents : {false, true}) {
    all.push_back(
        {.model = "wide",
         .dp = gpu_ranks().world() / 2,
         .cp = 2,
         .microbatches = 2,
         .checkpoint = ActivationCheckpoint::full,
         .keep_attention = documents,
         .max_norm = 0.1,
         .documents = documents,
         .precision = Precision()});
  }
  for (TensorRun run : all) {
    run.steps = 6;
    SCOPED_TRACE(run.name());
    const TensorResult collectives = train(run);
    run.copies = true;
    expect_same_bits(train(run), collectives);
  }
}

TEST_F(ContextParallelOnGpus, GraphsOfRegionsEqualEager) {
  for (TensorRun run : runs()) {
    const bool is_full = run.checkpoint == ActivationCheckpoint::full;
    run.graph_regions = {is_full ? "block" : "attn"};
    run.steps = 10;
    SCOPED_TRACE(run.name());
    const TensorResult graphs = train(run);
    run.graph_regions.clear();
    expect_same_bits(graphs, train(run));
    for (const auto& [rank, stats] : graphs.graphs) {
      EXPECT_GT(stats.forward_replays, 0);
      EXPECT_GT(stats.backward_replays, 0);
      EXPECT_TRUE(stats.fallbacks.empty()) << stats.fallbacks.begin()->first;
    }
  }
}

}  // namespace
}  // namespace flatshard::testing

int main(int argc, char** argv) {
  return flatshard::testing::gpu_ranks_main(argc, argv);
}
