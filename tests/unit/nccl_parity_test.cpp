// The parity suite over NCCL. One rank per GPU: alone it starts a rank for each
// GPU of the machine; under torchrun or Slurm it is one of their ranks. Without
// two GPUs it skips itself. Each rank runs the one-rank reference on its own
// GPU and compares what it owns.
#include "flatshard/comm/launch.h"
#include "flatshard/comm/store.h"
#include "flatshard/device/stream.h"
#include "tests/unit/training.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <iostream>

namespace flatshard {
namespace {

using testing::train_rank;
using testing::TrainingCase;
using testing::TrainingResult;

struct Ranks {
  RankEnvironment environment;
  StoreHandle store;
  at::Device device{at::kCUDA, 0};
};

Ranks& ranks() {
  static Ranks instance;
  return instance;
}

int num_gpu_files() {
  int count = 0;
  while (std::filesystem::exists("/dev/nvidia" + std::to_string(count))) {
    ++count;
  }
  return count;
}

class NcclParity : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!cuda_available() || ranks().environment.world_size < 2) {
      GTEST_SKIP() << "fewer than two GPUs: parity over NCCL is not tested";
    }
  }
};

// As in parity_test.cpp; GEMMs of other shapes round otherwise, but all ranks
// run the same shapes here.
double tolerance(const TrainingCase& c, int world) {
  const double eps = c.precision.compute == at::kFloat ? 0x1p-23 : 0x1p-8;
  return 64 * world * c.microbatches * eps;
}

TEST_P(NcclParity, EqualsOneRankWithMicrobatches) {
  const std::string strategy = GetParam();
  const int world = ranks().environment.world_size;
  const bool two_axes = strategy.starts_with("h");
  static int count = 0;
  std::vector<MeshAxis> axes{{"dp", world}};
  if (two_axes) {
    axes = {{"outer", world}, {"dp", 1}};
  }
  const auto mesh = Mesh::create(
      axes,
      ranks().environment.rank,
      ranks().store,
      ranks().device,
      {.name = "parity" + std::to_string(count++)});
  for (const int microbatches : {1, 3}) {
    for (const bool bf16 : {false, true}) {
      TrainingCase c{.strategy = strategy, .microbatches = microbatches};
      c.precision = bf16 ? Precision{} : Precision::full();
      c.max_norm = 1e9;
      std::mutex mutex;
      TrainingCase one = c;
      one.strategy = "zero0";
      one.batch_world = world;
      TrainingResult expected;
      expected.losses.assign(c.steps, 0.0);
      train_rank(one, Mesh::single(ranks().device), mutex, expected);
      for (const int prefetch : {0, 1, 3}) {
        SCOPED_TRACE(fmt::format(
            "microbatches {} bf16 {} prefetch {}",
            microbatches,
            bf16,
            prefetch));
        c.prefetch = prefetch;
        c.max_delay_us = 300;
        TrainingResult mine;
        mine.losses.assign(c.steps, 0.0);
        train_rank(c, mesh, mutex, mine);
        double largest = 0;
        double distance = 0;
        std::int64_t owned = 0;
        for (const auto& [name, values] : mine.weights) {
          const auto& other = expected.weights.at(name);
          ASSERT_EQ(values.size(), other.size());
          for (std::size_t i = 0; i < values.size(); ++i) {
            if (!std::isnan(values[i])) {
              ++owned;
              largest = std::max(largest, std::abs(double{other[i]}));
              distance =
                  std::max(distance, std::abs(double{values[i]} - other[i]));
            }
          }
        }
        EXPECT_GT(owned, 0);
        const bool bitwise = world == 2 && !bf16 && microbatches == 1;
        EXPECT_LE(distance, bitwise ? 0 : tolerance(c, world) * largest);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Strategies,
    NcclParity,
    ::testing::Values(
        "zero0",
        "zero1",
        "zero2",
        "zero3",
        "hsdp",
        "hfsdp",
        "hsdp_zero1"),
    [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  using namespace flatshard;
  if (!launched_by_environment() && num_gpu_files() > 1) {
    return spawn_local_ranks(num_gpu_files(), {argv, argv + argc});
  }
  ::testing::InitGoogleTest(&argc, argv);
  if (cuda_available()) {
    auto& self = ranks();
    self.environment = rank_environment_from_env();
    self.device = at::Device(
        at::kCUDA,
        static_cast<c10::DeviceIndex>(self.environment.local_rank));
    set_current_device(self.device);
    if (self.environment.world_size > 1) {
      self.store = make_tcp_store(self.environment);
    }
  }
  return RUN_ALL_TESTS();
}
