// The parity suite over NCCL. One rank per GPU: alone it starts a rank for each
// GPU of the machine; under torchrun or Slurm it is one of their ranks. Without
// two GPUs it skips itself. Each rank runs the one-rank reference on its own
// GPU and compares what it owns.
#include "flatshard/comm/launch.h"
#include "flatshard/comm/store.h"
#include "flatshard/device/stream.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/schedule/simulate.h"
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

class NcclSchedule : public NcclParity {};

// What NCCL really launched is what the Scheduler answers to the same events,
// and gathered weights have the same addresses from step 3 on.
TEST_P(NcclSchedule, LaunchesWhatTheSchedulerSaysAtStableAddresses) {
  const auto log = std::make_shared<CollectiveLog>();
  const auto mesh = Mesh::create(
      {{"dp", ranks().environment.world_size}},
      ranks().environment.rank,
      ranks().store,
      ranks().device,
      {.log = log, .name = std::string("schedule ") + GetParam()});
  constexpr std::int64_t kDim = 64;
  testing::ToyModel model(kDim, 4, /*with_root_parameter=*/false);
  const auto runtime = fully_shard(
      *model,
      mesh,
      {.units = model->unit_modules(), .strategy = GetParam(), .trace = true});
  AdamW optimizer(runtime->groups(), {});
  std::vector<void*> addresses;
  std::vector<nn::HookHandle> hooks;
  for (const auto& unit : runtime->units()) {
    if (!unit->parameters().empty()) {
      hooks.push_back(unit->module()->add_forward_pre_hook(
          [&addresses, u = unit.get()](nn::Module&, const nn::TensorList&) {
            addresses.push_back(u->parameters()[0].tensor.data_ptr());
          }));
    }
  }
  const at::Tensor x = at::ones(
      {8, kDim},
      at::TensorOptions(ranks().device).dtype(at::kBFloat16));
  std::vector<void*> expected;
  for (int step = 1; step <= 5; ++step) {
    addresses.clear();
    runtime->clear_trace();
    log->clear();
    model(x, at::zeros({8, kDim}, x.options().dtype(at::kFloat))).backward();
    optimizer.step(1e-3);
    optimizer.zero_grad();
    runtime->synchronize();
    if (step == 3) {
      expected = addresses;
    } else if (step > 3) {
      EXPECT_EQ(addresses, expected) << "step " << step;
    }
  }
  // The trace of one step that began and ended at rest.
  const RuntimeTrace trace = runtime->trace();
  Scheduler scheduler(
      runtime->scheduler().units(),
      runtime->scheduler().options());
  // Two rounds: the first teaches the order that the live one had recorded.
  replay(scheduler, trace.events);
  EXPECT_EQ(
      to_string(replay(scheduler, trace.events)),
      to_string(trace.actions));
  std::vector<CollectiveKind> said;
  for (const Action& action : trace.actions) {
    if (action.kind == ActionKind::gather) {
      said.push_back(CollectiveKind::all_gather);
    } else if (action.kind == ActionKind::reduce) {
      said.push_back(CollectiveKind::reduce_scatter);
    }
  }
  std::vector<CollectiveKind> launched;
  for (const CollectiveRecord& record : log->records()) {
    launched.push_back(record.kind);
  }
  EXPECT_EQ(launched, said);
  EXPECT_FALSE(said.empty());
}

INSTANTIATE_TEST_SUITE_P(
    Sharded,
    NcclSchedule,
    ::testing::Values("zero1", "zero2", "zero3"),
    [](const auto& info) { return std::string(info.param); });

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
