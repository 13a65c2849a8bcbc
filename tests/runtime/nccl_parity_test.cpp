// The parity suite over NCCL, one rank per GPU; without two GPUs it skips
// itself. Each rank runs the one-rank reference on its own GPU and compares
// what it owns.
#include "flatshard/device/stream.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/schedule/simulate.h"
#include "tests/runtime/training.h"
#include "tests/support/gpu_ranks.h"

#include <gtest/gtest.h>

#include <cmath>

namespace flatshard {
namespace {

using testing::gpu_ranks;
using testing::train_rank;
using testing::training_tolerance;
using testing::TrainingCase;
using testing::TrainingResult;

class NcclParity : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!cuda_available() || gpu_ranks().world() < 2) {
      GTEST_SKIP() << "fewer than two GPUs: parity over NCCL is not tested";
    }
  }
};

TEST_P(NcclParity, EqualsOneRankWithMicrobatches) {
  const std::string strategy = GetParam();
  const int world = gpu_ranks().world();
  const bool two_axes = strategy.starts_with("h");
  static int count = 0;
  std::vector<MeshAxis> axes{{"dp", world}};
  if (two_axes) {
    axes = {{"outer", world}, {"dp", 1}};
  }
  const auto mesh = gpu_ranks().mesh(axes, "parity" + std::to_string(count++));
  for (const int microbatches : {1, 3}) {
    for (const bool bf16 : {false, true}) {
      TrainingCase c{.strategy = strategy, .microbatches = microbatches};
      c.precision =
          bf16 ? Precision{.reduce = at::kBFloat16} : Precision::full();
      c.max_norm = 1e9;
      std::mutex mutex;
      TrainingCase one = c;
      one.strategy = "zero0";
      one.batch_world = world;
      TrainingResult expected;
      expected.losses.assign(c.steps, 0.0);
      train_rank(one, Mesh::single(gpu_ranks().device), mutex, expected);
      for (const int prefetch : {0, 1, 3}) {
        SCOPED_TRACE(fmt::format(
            "microbatches {} bf16 {} prefetch {}",
            microbatches,
            bf16,
            prefetch));
        c.prefetch = prefetch;
        // Options that must change no result, some of them in each.
        c.overlap_optimizer = prefetch > 0;
        c.grads_in_reduce_dtype = prefetch == 3;
        c.keep_compute_weights = prefetch != 3;
        // Updates on the CPU need not round as a GPU's do.
        c.offload = microbatches == 3 && prefetch != 1;
        c.copy_engines.gathers = prefetch == 0   ? CopyEngines::Gathers::forward
                                 : prefetch == 1 ? CopyEngines::Gathers::all
                                                 : CopyEngines::Gathers::none;
        c.copy_engines.reductions_nbytes = prefetch > 0 ? 1 << 16 : 0;
        c.slots_on_demand = prefetch == 1;
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
        // The same shapes have the same kernels; two gradients have one sum.
        const bool bitwise = world == 2 && !bf16 && microbatches == 1;
        EXPECT_LE(
            distance,
            bitwise ? 0 : training_tolerance(c, world) * largest);
      }
    }
  }
}

class NcclSchedule : public NcclParity {};

// NCCL really launches the Scheduler's answers to the same events, and
// unsharded weights have the same addresses from step 3 on.
TEST_P(NcclSchedule, LaunchesWhatTheSchedulerSaysAtStableAddresses) {
  const auto log = std::make_shared<CollectiveLog>();
  const auto mesh = gpu_ranks().mesh(
      {{"dp", gpu_ranks().world()}},
      std::string("schedule ") + GetParam(),
      log);
  constexpr std::int64_t kDim = 64;
  testing::ToyModel model(kDim, 4, /*with_root_parameter=*/false);
  const auto runtime = fully_shard(
      *model,
      mesh,
      {.units = model->unit_modules(),
       .strategy = GetParam(),
       .runtime = {.trace = true}});
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
      at::TensorOptions(gpu_ranks().device).dtype(at::kBFloat16));
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
  // The trace of one step, with all units idle before and after it.
  const RuntimeTrace trace = runtime->trace();
  Scheduler scheduler(
      runtime->scheduler().units(),
      runtime->scheduler().options());
  // The first of two rounds teaches the order that the recorded one had.
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

class NcclPitfalls : public NcclParity {};

// The optimizer's kernels run long after the host has queued the next forward:
// its all-gathers must wait for them.
TEST_P(NcclPitfalls, B7_GathersWaitForTheOptimizersKernels) {
  const auto mesh = gpu_ranks().mesh(
      {{"dp", gpu_ranks().world()}},
      std::string("pitfalls ") + GetParam());
  constexpr std::int64_t kDim = 64;
  testing::ToyModel model(kDim, 3, /*with_root_parameter=*/true);
  const auto runtime = fully_shard(
      *model,
      mesh,
      {.units = model->unit_modules(), .strategy = GetParam()});
  AdamW optimizer(runtime->groups(), {});
  const auto options = at::TensorOptions(gpu_ranks().device);
  const at::Tensor x = at::ones({8, kDim}, options.dtype(at::kBFloat16));
  const at::Tensor y = at::zeros({8, kDim}, options.dtype(at::kFloat));
  const at::Tensor slow = at::ones({4096, 4096}, options) / 4096;
  for (int step = 0; step < 4; ++step) {
    model(x, y).backward();
    at::Tensor busy = slow;
    for (int i = 0; i < 20; ++i) {
      busy = at::matmul(busy, slow);  // ahead of the update, on its stream
    }
    optimizer.step(0.1);
    optimizer.zero_grad();
    const at::NoGradGuard no_grad;
    const at::Tensor queued = model(x, y);
    runtime->synchronize();
    EXPECT_TRUE(queued.equal(model(x, y))) << "step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sharded,
    NcclPitfalls,
    ::testing::Values("zero3"),
    [](const auto& info) { return std::string(info.param); });

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
  return flatshard::testing::gpu_ranks_main(argc, argv);
}
