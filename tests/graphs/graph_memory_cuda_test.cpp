// Measures the memory that graphs access and allocate, on a GPU, and skips
// itself without one.
#include "flatshard/device/graph.h"
#include "flatshard/device/memory.h"
#include "flatshard/device/stream.h"
#include "flatshard/graphs/model_graphs.h"
#include "flatshard/optim/adamw.h"
#include "tests/graphs/graph_training.h"
#include "tests/runtime/factor_model.h"
#include "tests/support/gpu_ranks.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard {
namespace {

using testing::gpu_ranks;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kNumBlocks = testing::FactorModelImpl::kNumBlocks;
constexpr int kSteps = 5;
constexpr int kWarmupSteps = 2;

// Gives unused memory back, so that what is reserved is in use.
std::int64_t reserved_nbytes(at::Device device) {
  make_graph_pool(device)->make_room();
  return memory_stats(device).reserved_bytes;
}

class GraphMemoryOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU: what CUDA graphs touch and hold is not tested";
    }
  }

  /// Trains a model with square weights for a few steps.
  GraphStats train(std::int64_t dim, bool declared, bool first_waits = false) {
    const at::Device device = gpu_ranks().device;
    const at::Tensor factor = at::ones({dim}, at::device(device)) * 0.5;
    factor_address_ = fmt::format(
        "{:#x}",
        reinterpret_cast<std::uintptr_t>(factor.const_data_ptr()));
    testing::FactorModel model(dim, factor, declared);
    model->block(0)->waits = first_waits;
    const auto runtime = fully_shard(
        *model,
        Mesh::single(device),
        {.units = model->units(),
         .group = {.precision = Precision::full()},
         .runtime = {
             .graphs = {
                 .enabled = true,
                 .warmup_steps = kWarmupSteps,
                 .audit = true}}});
    AdamW optimizer(runtime->groups(), {});
    for (int step = 0; step < kSteps; ++step) {
      model(at::randn({8, dim}, at::device(device))).backward();
      optimizer.step(1e-3);
      optimizer.zero_grad();
    }
    optimizer.wait();
    runtime->synchronize();
    reserved_with_model_ = reserved_nbytes(device);
    return runtime->graphs().stats();
  }

  std::int64_t reserved_with_model_ = 0;
  std::string factor_address_;
};

constexpr std::int64_t kReplays =
    std::int64_t{kNumBlocks} * (kSteps - kWarmupSteps);

TEST_F(GraphMemoryOnGpu, TouchWhatIsDeclared) {
  const GraphStats stats = train(/*dim=*/64, /*declared=*/true);
  EXPECT_THAT(stats.fallbacks, IsEmpty());
  EXPECT_EQ(stats.forward_replays, kReplays);
  // Each kernel reads or writes something.
  EXPECT_GT(stats.audited_addresses, stats.captures);
  EXPECT_THAT(stats.audit_findings, IsEmpty());
}

TEST_F(GraphMemoryOnGpu, OtherMemoryIsReported) {
  const GraphStats stats = train(/*dim=*/64, /*declared=*/false);
  EXPECT_THAT(stats.fallbacks, IsEmpty());
  EXPECT_EQ(stats.forward_replays, kReplays);
  for (int block = 0; block < kNumBlocks; ++block) {
    EXPECT_THAT(
        stats.audit_findings,
        ::testing::Contains(::testing::AllOf(
            HasSubstr(fmt::format("unit block{}: ", block)),
            HasSubstr(factor_address_))));
  }
}

// The model with dropout is a custom one; the other model is Llama.
TEST_F(GraphMemoryOnGpu, ModelsOfTheMatrixAreClean) {
  for (const bool dropout : {false, true}) {
    testing::GraphCase c{.dropout = dropout, .steps = 5, .audit = true};
    testing::GraphTraining training(c, Mesh::single(gpu_ranks().device));
    const GraphStats stats = training.run().stats;
    EXPECT_GT(stats.audited_addresses, stats.captures);
    EXPECT_THAT(stats.audit_findings, IsEmpty());
  }
}

// The pool, the stream and the generators are as before.
TEST_F(GraphMemoryOnGpu, ACaptureThatFailsHarmsNoOther) {
  for (int run = 0; run < 2; ++run) {
    const GraphStats stats =
        train(/*dim=*/64, /*declared=*/true, /*first_waits=*/true);
    EXPECT_EQ(stats.forward_replays, kReplays / kNumBlocks * (kNumBlocks - 1));
    ASSERT_EQ(stats.fallbacks.size(), 1U);
    EXPECT_THAT(
        stats.fallbacks.begin()->first,
        HasSubstr("its capture failed: "));
    EXPECT_EQ(stats.fallbacks.begin()->second, kSteps - kWarmupSteps);
  }
}

TEST_F(GraphMemoryOnGpu, HoldNoParameters) {
  constexpr std::int64_t kDim = 4096;
  const GraphStats stats = train(kDim, /*declared=*/true);
  EXPECT_GT(stats.forward_replays, 0);
  EXPECT_GT(stats.nbytes, 0);
  // Activations are small here, so one copy of one block's weights would show.
  constexpr std::int64_t kWeightsOfABlock = kDim * kDim * 4;
  EXPECT_LT(stats.nbytes, kWeightsOfABlock);
}

TEST_F(GraphMemoryOnGpu, ComeBackWithTheModel) {
  train(/*dim=*/256, /*declared=*/true);  // what stays for the process
  const std::int64_t before = reserved_nbytes(gpu_ranks().device);
  const GraphStats stats = train(/*dim=*/256, /*declared=*/true);
  EXPECT_GT(stats.nbytes, 0);
  EXPECT_GE(reserved_with_model_, before + stats.nbytes);
  constexpr int kMore = 5;
  for (int model = 0; model < kMore; ++model) {
    train(/*dim=*/256, /*declared=*/true);
  }
  // A small segment may contain memory that stays in use. One memory pool per
  // model would be more.
  EXPECT_LT(
      reserved_nbytes(gpu_ranks().device),
      before + (kMore + 1) * stats.nbytes / 2);
}

TEST_F(GraphMemoryOnGpu, ComeBackWithAReset) {
  const testing::GraphCase c{.steps = 6};
  testing::GraphTraining training(c, Mesh::single(gpu_ranks().device));
  const GraphStats stats = training.run().stats;
  EXPECT_GT(stats.nbytes, 0);
  const std::int64_t with_graphs = reserved_nbytes(gpu_ranks().device);
  training.runtime().graphs().reset();
  EXPECT_EQ(training.runtime().graphs().stats().nbytes, 0);
  EXPECT_LE(reserved_nbytes(gpu_ranks().device), with_graphs - stats.nbytes);
}

}  // namespace
}  // namespace flatshard
