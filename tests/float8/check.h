#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

#include "flatshard/float8/quantize.h"

// The common parts of the tests of the CPU and of CUDA.
namespace flatshard::float8 {

inline constexpr Recipe kRecipes[] = {
    Recipe::tensorwise,
    Recipe::rowwise,
    Recipe::blockwise,
    Recipe::blockwise_1x128,
    Recipe::mxfp8};

inline at::Generator seeded(std::uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

/// Normal numbers; with outliers, a row and a column of zeros, rows from
/// subnormal to huge, and negative zeros.
inline at::Tensor
any_values(std::int64_t rows, std::int64_t columns, std::uint64_t seed) {
  at::Generator generator = seeded(seed);
  at::Tensor x = at::randn({rows, columns}, generator);
  x.mul_(at::randn({rows, 1}, generator).mul_(8).exp2_());
  if (rows > 4 && columns > 4) {
    x[1].zero_();
    x.select(1, 2).zero_();
    x[2].mul_(0x1p-120);
    x[3].mul_(0x1p-140);
    x[4].mul_(0x1p100);
    x[0][1] = 12345.0;
    x[0][0] = -0.0;
  }
  return x;
}

inline at::Tensor bytes(const at::Tensor& t) {
  at::Tensor plain = at::empty(t.sizes(), t.options().device(at::kCPU));
  return plain.copy_(t).view(at::kByte);
}

/// Bit for bit, NaN included.
inline void expect_same_bytes(
    const at::Tensor& got,
    const at::Tensor& want,
    const char* what) {
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  ASSERT_EQ(got.scalar_type(), want.scalar_type()) << what;
  const bool scalar = got.dim() == 0;
  const at::Tensor a = bytes(scalar ? got.unsqueeze(0) : got);
  const at::Tensor b = bytes(scalar ? want.unsqueeze(0) : want);
  if (!at::equal(a, b)) {
    const at::Tensor differ = (a != b).nonzero();
    const at::Tensor first = differ[0];
    std::string at;
    at::Tensor x = a, y = b;
    for (std::int64_t d = 0; d < first.numel(); ++d) {
      at += std::to_string(first[d].item<std::int64_t>()) + " ";
      x = x[first[d].item<std::int64_t>()];
      y = y[first[d].item<std::int64_t>()];
    }
    ADD_FAILURE() << what << ": " << differ.size(0) << " of " << a.numel()
                  << " bytes differ, first at " << at << ": " << x.item<int>()
                  << ", expected " << y.item<int>();
  }
}

inline std::string describe(const Quantizer& q) {
  return std::string(to_string(q.recipe)) + " " +
         std::string(to_string(q.format)) + " " +
         std::string(to_string(q.rounding));
}

}  // namespace flatshard::float8
