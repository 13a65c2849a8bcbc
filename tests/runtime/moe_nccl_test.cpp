// Models with experts on GPUs. One rank per GPU, or two that share one
// (scripts/share_gpu): against one rank, and copies against collectives. Graphs
// on any number of ranks. Without a GPU it skips itself.
#include "tests/runtime/moe_training.h"
#include "tests/support/gpu_ranks.h"

#include <ATen/Context.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace flatshard::testing {
namespace {

using models::ActivationCheckpoint;

class MoeOnGpus : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU: experts on GPUs are not tested";
    }
    at::globalContext().setDeterministicAlgorithms(true, false);
  }
  void TearDown() override {
    at::globalContext().setDeterministicAlgorithms(false, false);
  }

  static int world() { return gpu_ranks().world(); }

  // Trains with a mesh: {1, world}, the last axis for experts.
  static MoeResult train(const MoeRun& run) {
    std::mutex mutex;
    MoeResult result;
    std::vector<MeshAxis> axes;
    for (std::size_t i = 0; i < run.mesh.size(); ++i) {
      axes.push_back({fmt::format("axis{}", i), run.mesh[i]});
    }
    static int count = 0;
    const auto mesh = run.world() == 1
                          ? Mesh::single(gpu_ranks().device)
                          : gpu_ranks().mesh(axes, fmt::format("{}", count++));
    train_moe_rank(run, mesh, mutex, result);
    return result;
  }
  static void expect_same_with_graphs(MoeRun run);
};

// Returns the distance of this rank's values, while `want` may have more.
MoeDistance distance_here(const MoeResult& got, const MoeResult& want) {
  MoeDistance distance;
  const auto note = [&](double difference, const std::string& where) {
    if (!(difference <= distance.largest)) {
      distance = {difference, where};
    }
  };
  for (const auto& [key, loss] : got.losses) {
    note(std::abs(want.losses.at(key) - loss), "a loss");
  }
  for (const auto& [name, values] : got.weights) {
    const auto& other = want.weights.at(name);
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (!std::isnan(values[i])) {
        note(std::abs(double{values[i]} - other.at(i)), name);
      }
    }
  }
  return distance;
}

std::int64_t num_owned(const MoeResult& result) {
  std::int64_t owned = 0;
  for (const auto& [name, values] : result.weights) {
    owned +=
        std::ranges::count_if(values, [](float v) { return !std::isnan(v); });
  }
  return owned;
}

void MoeOnGpus::expect_same_with_graphs(MoeRun run) {
  const MoeResult want = train(run);
  run.graphs = true;
  run.regions.insert("moe_preprocess");
  const MoeResult got = train(run);
  const MoeDistance distance = distance_here(got, want);
  EXPECT_EQ(distance.largest, 0) << distance.where;
  if (gpu_ranks().rank() == 0) {
    // A step's forwards and backwards of all six regions, and the row order of
    // two regions without a backward.
    EXPECT_GE(got.num_replays, run.microbatches * 14);
  }
}

// The rule is the CPUs', except that norms are float32 here: clipping has other
// last bits.
TEST_F(MoeOnGpus, RanksThatDivideExpertsEqualOne) {
  if (world() < 2 || 8 % world() != 0) {
    GTEST_SKIP() << "expected 2, 4 or 8 ranks, have " << world();
  }
  for (const char* strategy : {"zero0", "zero1", "zero2", "zero3"}) {
    for (const int microbatches : {1, 3}) {
      for (const bool recompute : {false, true}) {
        const MoeRun run{
            .strategy = strategy,
            .mesh = {1, world()},
            .microbatches = microbatches,
            .checkpoint = recompute ? ActivationCheckpoint::full
                                    : ActivationCheckpoint::none,
            .max_norm = 0.2,
            .exchange = MoeExchange::collective};
        SCOPED_TRACE(fmt::format(
            "{} microbatches {} recompute {}",
            strategy,
            microbatches,
            recompute));
        const MoeResult got = train(run);
        const MoeDistance distance =
            distance_here(got, train(moe_reference(run)));
        constexpr double kMultiple = 8;
        EXPECT_LE(distance.largest, kMultiple * run.sequences() * 0x1p-24)
            << distance.where;
        EXPECT_EQ(got.losses.size(), 3U * microbatches);
        EXPECT_GT(num_owned(got), 0);
      }
    }
  }
}

TEST_F(MoeOnGpus, CopiesGiveTheBitsOfTheCollective) {
  if (world() < 2 || 8 % world() != 0) {
    GTEST_SKIP() << "expected 2, 4 or 8 ranks, have " << world();
  }
  for (const bool float32 : {false, true}) {
    for (const auto checkpoint :
         {ActivationCheckpoint::none,
          ActivationCheckpoint::full,
          ActivationCheckpoint::selective}) {
      MoeRun run{
          .mesh = {1, world()},
          .microbatches = 3,
          .checkpoint = checkpoint,
          .max_norm = 0.2,
          .exchange = MoeExchange::collective,
          .float32 = float32,
          .groups_by_rank = false};
      const MoeResult want = train(run);
      run.exchange = MoeExchange::copies;
      const MoeDistance distance = distance_here(train(run), want);
      EXPECT_EQ(distance.largest, 0) << distance.where;
      EXPECT_GT(num_owned(want), 0);
    }
  }
}

TEST_F(MoeOnGpus, GraphsGiveTheBitsOfEagerSteps) {
  const bool divides = world() > 1 && 8 % world() == 0;
  for (const auto checkpoint :
       {ActivationCheckpoint::none,
        ActivationCheckpoint::full,
        ActivationCheckpoint::selective}) {
    MoeRun run{
        .mesh =
            divides ? std::vector<int>{1, world()} : std::vector<int>{world()},
        .microbatches = 3,
        .checkpoint = checkpoint,
        .exchange = divides ? MoeExchange::collective : MoeExchange::none,
        .float32 = false,
        .groups_by_rank = false};
    expect_same_with_graphs(run);
  }
}

// The same of experts of which each rank has a part of the width.
TEST_F(MoeOnGpus, GraphsBetweenCutExpertsGiveTheBitsOfEagerSteps) {
  if (world() < 2 || 8 % world() != 0) {
    GTEST_SKIP() << "expected 2, 4 or 8 ranks, have " << world();
  }
  expect_same_with_graphs(
      {.mesh = {1, world() / 2, 2},
       .microbatches = 3,
       .capacity_factor = 1,
       .exchange = MoeExchange::collective,
       .cuts_width = true,
       .float32 = false,
       .groups_by_rank = false});
}

}  // namespace
}  // namespace flatshard::testing

int main(int argc, char** argv) {
  return flatshard::testing::gpu_ranks_main(argc, argv);
}
