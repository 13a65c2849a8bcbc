#include <gtest/gtest.h>

#include "check.h"
#include "flatshard/nn/attention.h"
#include "flatshard/nn/documents.h"
#include "flatshard/nn/recompute.h"
#include "tests/support/counted_operation.h"

#include <ATen/ATen.h>

#include <ostream>

// Attention that a recomputed part keeps, of each kernel on a GPU: bitwise the
// same, and the second run launches none. Skips itself without a GPU.
namespace flatshard::nn {
namespace {

struct KernelCase {
  const char* name;
  const char* forward;  ///< the operation of ATen that launches the kernel
  at::ScalarType dtype = at::kBFloat16;
  std::int64_t head_dim = 64;
  std::int64_t window = 0;
  bool sinks = false;
  bool documents = false;
  /// cuDNN and the kernel for float32 add gradients in any order.
  bool deterministic = true;
};

std::ostream& operator<<(std::ostream& out, const KernelCase& c) {
  return out << c.name;
}

class CudaKeptAttention : public ::testing::TestWithParam<KernelCase> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) {
      GTEST_SKIP() << "no GPU, or a build without CUDA";
    }
    at::globalContext().setDeterministicAlgorithms(
        GetParam().deterministic,
        /*warn_only=*/false);
  }
  void TearDown() override {
    at::globalContext().setDeterministicAlgorithms(false, false);
  }
};

enum class Mode { none, recompute, keep };

TEST_P(CudaKeptAttention, L1_IsBitwiseTheSameWithoutASecondKernel) {
  constexpr std::int64_t kSeq = 300, kHeads = 8, kKvHeads = 2;
  const KernelCase& c = GetParam();
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  const auto random = [&](std::vector<std::int64_t> shape) {
    return at::randn(shape, generator).to(at::kCUDA, c.dtype);
  };
  const at::Tensor q = random({2, kSeq, kHeads, c.head_dim}),
                   k = random({2, kSeq, kKvHeads, c.head_dim}),
                   v = random({2, kSeq, kKvHeads, c.head_dim}),
                   sinks = random({kHeads}),
                   g = random({2, kSeq, kHeads * c.head_dim});
  const std::vector<std::int64_t> lengths{1, 170, 129, 293, 7};
  const auto documents = Documents::of(lengths, kSeq, at::kCUDA);
  const RecomputeFn attend = [&](const TensorList& in) {
    const AttentionArgs args{
        .window = c.window,
        .sinks = c.sinks ? in[3] : at::Tensor()};
    return TensorList{
        c.documents ? document_attention(in[0], in[1], in[2], documents, args)
                    : causal_attention(in[0], in[1], in[2], args)};
  };
  const auto owner = std::make_shared<Module>("owner");
  testing::CountedOperation calls(c.forward);
  TensorList expected;
  for (const Mode mode : {Mode::none, Mode::recompute, Mode::keep}) {
    TensorList leaves{q, k, v};
    if (c.sinks) {
      leaves.push_back(sinks);
    }
    for (at::Tensor& leaf : leaves) {
      leaf = leaf.clone().requires_grad_();
    }
    const at::Tensor out = mode == Mode::none
                               ? attend(leaves)[0]
                               : checkpoint(
                                     *owner,
                                     attend,
                                     leaves,
                                     {.keep_attention = mode == Mode::keep})[0];
    EXPECT_EQ(calls.take(), 1);
    out.backward(g);
    EXPECT_EQ(calls.take(), mode == Mode::recompute ? 1 : 0);
    TensorList got{out.detach()};
    for (const at::Tensor& leaf : leaves) {
      got.push_back(leaf.grad());
    }
    if (mode == Mode::none) {
      expected = got;
    }
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (i == 0 || c.deterministic) {
        EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
      } else {
        // Two roundings of a bfloat16, or of the sums of 300 tokens.
        EXPECT_LE(
            relative_error(got[i], expected[i]),
            c.dtype == at::kFloat ? 300 * 0x1p-24 : 0x1p-7)
            << i;
      }
    }
  }
}

constexpr const char* kFlash = "aten::_flash_attention_forward";

INSTANTIATE_TEST_SUITE_P(
    Kernels,
    CudaKeptAttention,
    ::testing::Values(
        KernelCase{
            .name = "cudnn",
            .forward = "aten::_scaled_dot_product_cudnn_attention",
            .head_dim = 128,
            .deterministic = false},
        KernelCase{
            .name = "efficient",
            .forward = "aten::_scaled_dot_product_efficient_attention",
            .dtype = at::kFloat,
            .deterministic = false},
        // ATen's choice where cuDNN may not run.
        KernelCase{.name = "deterministic", .forward = kFlash},
        KernelCase{.name = "wide_heads", .forward = kFlash, .head_dim = 256},
        KernelCase{.name = "window", .forward = kFlash, .window = 33},
        KernelCase{.name = "sinks", .forward = kFlash, .sinks = true},
        KernelCase{
            .name = "window_and_sinks",
            .forward = kFlash,
            .window = 33,
            .sinks = true},
        KernelCase{.name = "documents", .forward = kFlash, .documents = true},
        KernelCase{
            .name = "documents_window_and_sinks",
            .forward = kFlash,
            .window = 33,
            .sinks = true,
            .documents = true}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace flatshard::nn
