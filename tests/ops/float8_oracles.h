#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "flatshard/ops/float8/float8_fused.h"

// The inputs of the tests of fused kernels, and the same in float32.
namespace flatshard::nn {

inline std::vector<float8::Quantizer> float8_quantizers() {
  return {
      {float8::Recipe::tensorwise},
      {float8::Recipe::rowwise},
      {float8::Recipe::blockwise},
      {float8::Recipe::blockwise_1x128},
      {float8::Recipe::mxfp8},
      {float8::Recipe::mxfp8, float8::Format::e4m3, float8::Rounding::floor}};
}

struct Float8Inputs {
  Float8Inputs(
      std::int64_t rows,
      std::int64_t dim,
      at::Device device,
      at::ScalarType dtype) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(rows);
    const auto draw = [&](at::IntArrayRef sizes) {
      return at::randn(sizes, generator).to(dtype).to(device);
    };
    // Halves of one tensor, as one matmul returns them.
    const at::Tensor both = draw({rows, 2 * dim});
    gate = both.narrow(1, 0, dim);
    up = both.narrow(1, dim, dim);
    dy = draw({rows, dim});
    weight = draw({dim});
  }

  static at::Tensor wide(const at::Tensor& t) { return t.cpu().to(at::kFloat); }
  at::Tensor product() const { return at::silu(wide(gate)) * wide(up); }
  at::Tensor product_gradient() const {
    const at::Tensor g = wide(gate), u = wide(up), d = wide(dy);
    return at::cat({at::silu_backward(d * u, g), d * at::silu(g)}, 1);
  }
  at::Tensor rstd() const {
    const at::Tensor sum = wide(gate + up);
    return sum.square().mean(-1).add(1e-5).rsqrt();
  }
  at::Tensor norm() const {
    return wide(gate + up) * rstd().unsqueeze(1) * wide(weight);
  }

  at::Tensor gate, up, dy, weight;
};

/// Checks that only rows and only columns, with the amax that computing both
/// found, equal the planes of both. A norm is checked in its backward as well.
inline void expect_single_planes(
    const Float8Inputs& in,
    const float8::Quantizer& q,
    std::int64_t multiple) {
  const auto same = [](const float8::Plane& a, const float8::Plane& b) {
    EXPECT_TRUE(a.data.view(at::kByte).equal(b.data.view(at::kByte)));
    EXPECT_TRUE(a.scales.to(at::kFloat).equal(b.scales.to(at::kFloat)));
  };
  const auto check = [&](const Float8RowsAndColumns& both, const auto& make) {
    const Float8RowsAndColumns rows = make({.columns = false});
    same(rows.rows, both.rows);
    EXPECT_FALSE(rows.columns.data.defined());
    const Float8RowsAndColumns columns =
        make({.rows = false, .multiple = multiple, .amax = rows.amax});
    same(columns.columns, both.columns);
    EXPECT_FALSE(columns.rows.data.defined());
    EXPECT_EQ(rows.amax.defined(), q.recipe == float8::Recipe::tensorwise);
  };
  const Float8Wanted all{.multiple = multiple};
  check(swiglu_float8(in.gate, in.up, q, all), [&](const Float8Wanted& wanted) {
    return swiglu_float8(in.gate, in.up, q, wanted);
  });
  const at::Tensor x = in.gate.contiguous();
  const NormFloat8 norm = rms_norm_float8(x, in.up, in.weight, 1e-5, q, all);
  check(norm.planes, [&](const Float8Wanted& wanted) {
    return rms_norm_float8(x, in.up, in.weight, 1e-5, q, wanted).planes;
  });
  check(norm.planes, [&](const Float8Wanted& wanted) {
    return rms_norm_float8_again(norm.sum, norm.rstd, in.weight, q, wanted);
  });
}

/// Each value within half a unit in the last place of FP8 and of bfloat16 of
/// the float32 result.
inline void expect_near(
    const Float8RowsAndColumns& planes,
    const at::Tensor& want,
    float8::Recipe recipe) {
  const auto check = [&](const float8::Plane& plane, const at::Tensor& exact) {
    const at::Tensor got =
        float8::dequantize(plane, recipe).cpu().narrow(1, 0, exact.size(1));
    // In addition to the relative error half of the least subnormal: 2^-10 of
    // 448 is the largest part of amax that it can be.
    const double least = exact.abs().max().item<double>() * 0x1p-10 / 448 * 2;
    const at::Tensor error = (got - exact).abs();
    const at::Tensor bound = exact.abs() * (0x1p-4 + 0x1p-6) + least;
    // floor saturates up to 1/8 of a block's largest.
    const double share = (error > bound).to(at::kDouble).mean().item<double>();
    EXPECT_LE(share, 0.01);
    EXPECT_LE((error - exact.abs() / 8 - bound).max().item<double>(), 0.0);
  };
  check(planes.rows, want);
  check(planes.columns, want.t());
}

}  // namespace flatshard::nn
