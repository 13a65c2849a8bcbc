#include "flatshard/comm/sum_rows.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <cmath>

#include "flatshard/device/stream.h"

namespace flatshard {
namespace {

// Rows as they are in a CopyReducer: some elements apart, from `offset` on.
struct Shape {
  std::int64_t size;
  std::int64_t n;
  std::int64_t stride;
  std::int64_t offset;
};

const Shape kShapes[] = {
    {2, 64, 64, 0},
    {8, 1000, 1024, 0},
    {8, 4096, 4096, 0},
    {3, 1, 128, 0},
    {4, 77, 77, 0},      // rows that begin anywhere
    {5, 1023, 1024, 3},  // and memory that does
    {8, 1 << 20, 1 << 20, 0}};

// In float64.
at::Tensor oracle(const at::Tensor& rows, ReduceOp op) {
  const at::Tensor sum = rows.to(at::kDouble).sum(0);
  return op == ReduceOp::avg ? sum / static_cast<double>(rows.size(0)) : sum;
}

void expect_close(const at::Tensor& out, const at::Tensor& rows, ReduceOp op) {
  const at::Tensor want = oracle(rows, op);
  // One rounding to the dtype, and one to float32 per row on the way.
  const double unit = out.scalar_type() == at::kFloat      ? 0x1p-24
                      : out.scalar_type() == at::kBFloat16 ? 0x1p-8
                                                           : 0x1p-11;
  const at::Tensor bound =
      want.abs() * unit + rows.to(at::kDouble).abs().sum(0) *
                              (static_cast<double>(rows.size(0)) * 0x1p-24);
  EXPECT_TRUE((out.to(at::kDouble) - want).abs().le(bound).all().item<bool>())
      << c10::toString(out.scalar_type()) << " " << c10::str(rows.sizes());
}

void expect_sums(at::Device device) {
  auto generator = at::detail::createCPUGenerator(7);
  for (const Shape& shape : kShapes) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const at::Tensor memory =
          at::randn({shape.offset + shape.size * shape.stride}, generator)
              .to(dtype)
              .to(device);
      const at::Tensor rows = memory.as_strided(
          {shape.size, shape.n},
          {shape.stride, 1},
          shape.offset);
      const int rank = static_cast<int>(shape.n % shape.size);
      const at::Tensor own = rows.select(0, rank).clone();
      const at::Tensor all = rows.cpu().clone();
      rows.select(0, rank).fill_(std::nan(""));  // must not be read
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg}) {
        // Between guards, at 16 bytes and one element further.
        for (const std::int64_t begin : {16, 17}) {
          const at::Tensor guarded =
              at::full({begin + shape.n + 1}, 9, memory.options());
          const at::Tensor out = guarded.narrow(0, begin, shape.n);
          sum_rows(out, rows, rank, own, op);
          EXPECT_EQ(guarded[begin - 1].item<double>(), 9);
          EXPECT_EQ(guarded[begin + shape.n].item<double>(), 9);
          expect_close(out.cpu(), all, op);
        }
      }
    }
  }
}

// Bit for bit what ATen's two passes give.
void expect_added(at::Device device) {
  auto generator = at::detail::createCPUGenerator(8);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t n : {1, 77, 1024, 70001}) {
      for (const std::int64_t begin : {0, 8, 3}) {
        const at::Tensor from = at::randn({begin + n}, generator)
                                    .to(dtype)
                                    .to(device)
                                    .narrow(0, begin, n);
        const at::Tensor old = at::randn({n + 8}, generator).to(device);
        const std::int64_t into = begin == 8 ? 4 : 1;  // 4: 16 bytes
        for (const double scale : {1.0, 0.25}) {
          for (const bool add : {false, true}) {
            const at::Tensor guarded = old.clone();
            add_scaled(guarded.narrow(0, into, n), from, scale, add);
            const at::Tensor want = old.clone();
            const at::Tensor scaled = from.to(at::kFloat) * scale;
            want.narrow(0, into, n)
                .copy_(add ? old.narrow(0, into, n) + scaled : scaled);
            EXPECT_TRUE(guarded.equal(want))
                << c10::toString(dtype) << " " << n << " " << begin << " "
                << scale << " " << add;
          }
        }
      }
    }
  }
}

TEST(AddScaled, IsTheSumOfAten) {
  expect_added(at::kCPU);
}

TEST(AddScaled, IsTheSumOfAtenOnAGpu) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  expect_added(at::Device(at::kCUDA, 0));
}

TEST(SumRows, B44_SumsAndMeansEqualTheOracle) {
  expect_sums(at::kCPU);
}

TEST(SumRows, B44_SumsAndMeansEqualTheOracleOnAGpu) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  expect_sums(at::Device(at::kCUDA, 0));
}

}  // namespace
}  // namespace flatshard
