// FP8 weights on GPUs, one rank for each; without a GPU it skips itself. Two
// ranks on one GPU: scripts/share_gpu 2 build/tests/runtime_float8_cuda_test
#include "flatshard/device/stream.h"
#include "tests/runtime/float8_training.h"
#include "tests/support/gpu_ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

namespace flatshard::testing {
namespace {

class Float8Gpus : public ::testing::TestWithParam<Float8Format> {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU: FP8 matmuls are not tested";
    }
  }
};
INSTANTIATE_TEST_SUITE_P(
    All,
    Float8Gpus,
    ::testing::ValuesIn(float8_formats()),
    [](const auto& info) { return name_of_format(info.param); });

std::shared_ptr<Mesh> gpus(const std::string& name) {
  return gpu_ranks().world() == 1
             ? Mesh::single(gpu_ranks().device)
             : gpu_ranks().mesh({{"dp", gpu_ranks().world()}}, name);
}

std::string test_name() {
  const auto* const info =
      ::testing::UnitTest::GetInstance()->current_test_info();
  return std::string(info->test_suite_name()) + info->name();
}

Float8Run train_on_gpus(Float8Case c, const std::string& name) {
  c.format->emulate = true;  // mxfp8 before sm_100
  c.reporting_rank = gpu_ranks().rank();
  std::mutex mutex;
  Float8Run run;
  const std::shared_ptr<Mesh> mesh = gpus(test_name() + name);
  train_float8_rank(c, mesh, mutex, run);
  // A process has its own shards, NaN elsewhere. Which rows it has depends on
  // the parts that are all-gathered.
  for (auto& [parameter, values] : run.weights) {
    const at::Tensor all = at::from_blob(
        values.data(),
        {static_cast<std::int64_t>(values.size())},
        at::kFloat);
    const at::Tensor sum = all.nan_to_num(0).to(mesh->device());
    if (mesh->size() > 1) {
      mesh->world().all_reduce(sum, ReduceOp::sum);
    }
    all.copy_(sum);
  }
  return run;
}

// The planes are bitwise equal, so only matmuls and attention round
// differently.
TEST_P(Float8Gpus, LossesAreThoseOfTheCpu) {
  const Float8Run gpu = train_on_gpus({.format = GetParam()}, "");
  Float8Case on_cpu{.format = GetParam()};
  on_cpu.microbatches = gpu_ranks().world();
  const Float8Run cpu = train_float8(on_cpu);
  for (const auto& [at, loss] : gpu.losses) {
    EXPECT_NEAR(loss, cpu.losses.at(at), at.first == 0 ? 0.03 : 0.15)
        << "step " << at.first;
  }
}

// The time of all-gathers changes no bit, with torch's deterministic kernels.
TEST_P(Float8Gpus, PartsAndRecomputationChangeNothing) {
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  const Float8Run plain = train_on_gpus({.format = GetParam()}, "plain");
  for (const GatherParts parts :
       {GatherParts::unit, GatherParts::recomputed, GatherParts::module}) {
    for (const auto checkpoint :
         {models::ActivationCheckpoint::none,
          models::ActivationCheckpoint::selective}) {
      const Float8Run run = train_on_gpus(
          {.format = GetParam(),
           .gather_parts = parts,
           .checkpoint = checkpoint},
          std::to_string(static_cast<int>(parts)) +
              std::to_string(static_cast<int>(checkpoint)));
      EXPECT_EQ(run.losses, plain.losses);  // NaN is not equal to itself
      EXPECT_EQ(run.weights, plain.weights);
    }
  }
  at::globalContext().setDeterministicAlgorithms(false, false);
}

// Neither do graphs, planes that are not stored, and copy engines.
TEST_P(Float8Gpus, OtherWaysToAKernelChangeNothing) {
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  const Float8Case plain{
      .format = GetParam(),
      .steps = 5,
      .prefetches_between_steps = false};
  const Float8Run want = train_on_gpus(plain, "plain");
  const auto check = [&](const std::string& name,
                         const std::function<void(Float8Case&)>& change) {
    SCOPED_TRACE(name);
    Float8Case c = plain;
    change(c);
    const Float8Run run = train_on_gpus(c, name);
    EXPECT_EQ(run.losses, want.losses);
    EXPECT_EQ(run.weights, want.weights);
    EXPECT_TRUE(run.graphs.fallbacks.empty())
        << run.graphs.fallbacks.begin()->first;
    EXPECT_EQ(
        run.graphs.step_replays,
        c.whole_step ? c.steps - Float8Case::kWarmupSteps : 0);
    EXPECT_EQ(run.graphs.forward_replays > 0, !c.regions.empty());
  };
  check("steps", [](Float8Case& c) { c.whole_step = true; });
  check("blocks", [](Float8Case& c) { c.regions = {"block"}; });
  check("halves", [](Float8Case& c) {
    c.regions = {"attn", "mlp"};
    c.gather_parts = GatherParts::module;
  });
  check("made", [](Float8Case& c) { c.keep_compute_weights = false; });
  if (gpu_ranks().world() > 1) {
    check("copied", [](Float8Case& c) { c.copy_engines = CopyEngines::all(); });
  }
  at::globalContext().setDeterministicAlgorithms(false, false);
}

}  // namespace
}  // namespace flatshard::testing

int main(int argc, char** argv) {
  return flatshard::testing::gpu_ranks_main(argc, argv);
}
