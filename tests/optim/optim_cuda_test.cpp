// The CUDA kernels against the CPU loops. Skips itself without a GPU.
#include "flatshard/device/stream.h"
#include "tests/optim/float8_update.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <gtest/gtest.h>

#include <vector>

namespace flatshard {
namespace {

constexpr auto kSkipped = UpdateRange::kSkipped;

struct KernelCase {
  std::int64_t numel;
  std::vector<UpdateRange> ranges;  ///< of three rows
};

// More elements than one launch has threads, rows that change inside a vector
// of four, ranges of one element, skipped ones.
std::vector<KernelCase> kernel_cases() {
  return {
      {16, {}},
      {16, {{16, 1}}},
      {4096, {{1, 2}, {2, 0}, {1023, 1}, {4096, 0}}},
      {4096, {{6, kSkipped}, {7, 1}, {1025, 2}, {4094, kSkipped}, {4096, 0}}},
      {3 << 20, {{1000003, 1}, {3 << 20, 0}}}};
}

// Returns three rows whose scalars all differ.
template <class Step>
std::vector<UpdateRow> rows_of(Step step) {
  std::vector<UpdateRow> rows;
  for (const float factor : {1.0F, 0.5F, 0.25F}) {
    UpdateRow row = step.row();
    for (float* scalar :
         {&row.lr,
          &row.weight_decay,
          &row.beta1,
          &row.beta2,
          &row.eps,
          &row.step_size,
          &row.inverse_c2,
          &row.momentum}) {
      *scalar *= factor;
    }
    rows.push_back(row);
  }
  return rows;
}

FlatUpdate
host_update(const KernelCase& c, at::ScalarType grad, at::ScalarType compute) {
  auto generator = at::detail::createCPUGenerator(9);
  FlatUpdate update;
  update.main = at::randn({c.numel}, generator, at::kFloat);
  update.grad = at::randn({c.numel}, generator, at::kFloat).to(grad);
  if (compute != at::kFloat) {
    update.compute = at::zeros({c.numel}, compute);
  }
  update.state0 = at::randn({c.numel}, generator, at::kFloat) * 0.1;
  update.state1 = at::rand({c.numel}, generator, at::kFloat) * 0.1;
  update.grad_scale = at::scalar_tensor(0.3F);
  update.ranges = c.ranges;
  return update;
}

FlatUpdate on_gpu(const FlatUpdate& host) {
  const auto move = [](const at::Tensor& t) {
    return t.defined() ? t.to(at::kCUDA) : t;
  };
  FlatUpdate update;
  update.main = move(host.main);
  update.grad = move(host.grad);
  update.compute = move(host.compute);
  update.state0 = move(host.state0);
  update.state1 = move(host.state1);
  update.grad_scale = move(host.grad_scale);
  update.ranges = host.ranges;
  update.upload_ranges(at::kCUDA);
  update.rows = host.rows;
  update.device_rows = upload_rows(host.rows, at::kCUDA);
  return update;
}

void expect_equal(const FlatUpdate& gpu, const FlatUpdate& host) {
  const auto same = [](const at::Tensor& a, const at::Tensor& b) {
    return a.defined() == b.defined() && (!a.defined() || a.cpu().equal(b));
  };
  EXPECT_TRUE(same(gpu.main, host.main));
  EXPECT_TRUE(same(gpu.state0, host.state0));
  EXPECT_TRUE(same(gpu.state1, host.state1));
  if (gpu.compute.defined()) {
    EXPECT_TRUE(gpu.compute.equal(gpu.main.to(gpu.compute.scalar_type())));
  }
}

class CudaUpdates : public ::testing::TestWithParam<
                        std::tuple<at::ScalarType, at::ScalarType>> {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU";
    }
  }
};

TEST_P(CudaUpdates, AdamW) {
  const auto [grad, compute] = GetParam();
  const AdamWStep step{
      .lr = 0.01F,
      .weight_decay = 0.1F,
      .beta1 = 0.9F,
      .beta2 = 0.95F,
      .eps = 1e-6F,
      .bias_correction1 = 0.271F,
      .bias_correction2 = 0.142625F};
  for (const KernelCase& c : kernel_cases()) {
    FlatUpdate host = host_update(c, grad, compute);
    host.rows = rows_of(step);
    const FlatUpdate gpu = on_gpu(host);
    for (int i = 0; i < 2; ++i) {
      adamw_update(host);
      adamw_update(gpu);
    }
    expect_equal(gpu, host);
  }
}

TEST_P(CudaUpdates, Sgd) {
  const auto [grad, compute] = GetParam();
  for (const bool with_momentum : {false, true}) {
    for (const KernelCase& c : kernel_cases()) {
      FlatUpdate host = host_update(c, grad, compute);
      host.state1 = at::Tensor();
      if (!with_momentum) {
        host.state0 = at::Tensor();
        host.grad_scale = at::Tensor();
      }
      FlatUpdate gpu = on_gpu(host);
      for (const bool first : {true, false}) {
        host.rows = rows_of(SgdStep{
            .lr = 0.1F,
            .weight_decay = 0.2F,
            .momentum = with_momentum ? 0.9F : 0.0F,
            .first = first});
        gpu.rows = host.rows;
        gpu.device_rows = upload_rows(host.rows, at::kCUDA);
        sgd_update(host);
        sgd_update(gpu);
      }
      expect_equal(gpu, host);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    CudaUpdates,
    ::testing::Combine(
        ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
        ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf)),
    [](const auto& info) {
      return std::string(c10::toString(std::get<0>(info.param))) + "Grad" +
             c10::toString(std::get<1>(info.param)) + "Compute";
    });

// Bytes and amax belong to the weights that the same kernel stores.
TEST(CudaFloat8Updates, AreMadeOfTheNewWeights) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  for (const Float8UpdateCase& c : float8_update_cases()) {
    for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(c.name);
      const std::int64_t n = c.numel;
      for (const std::vector<UpdateRange>& ranges :
           {std::vector<UpdateRange>(), {{n / 3, 1}, {n, 2}}}) {
        FlatUpdate host = host_update({n, ranges}, at::kBFloat16, compute);
        host.rows = rows_of(kSomeStep);
        FlatUpdate update = on_gpu(host);
        update.float8 = c.outputs(at::kCUDA);
        adamw_update(update);
        adamw_update(host);
        expect_equal(update, host);
        Float8Outputs want = c.outputs(at::kCPU);
        write_float8_outputs(want, update.main.cpu());
        c.expect_same(update.float8, want);
      }
    }
  }
}

// A rank that has no row of any weight.
TEST(CudaFloat8Updates, AShardOfPaddingHasNoRuns) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  FlatUpdate host = host_update({64, {}}, at::kFloat, at::kBFloat16);
  host.rows = {kSomeStep.row()};
  FlatUpdate update = on_gpu(host);
  update.float8.amax = at::zeros({2}, at::TensorOptions(at::kCUDA));
  adamw_update(update);
  EXPECT_FALSE(update.float8.amax.any().item<bool>());
}

}  // namespace
}  // namespace flatshard
