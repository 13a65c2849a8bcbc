#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "flatshard/nn/float8_fused.h"

// What the tests of fused kernels feed them, and the same in float32.
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
    // Halves of one tensor, as one product gives them.
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

/// Each value within FP8's half unit in the last place, and bfloat16's, of
/// what float32 gives.
inline void expect_near(
    const Float8Planes& planes,
    const at::Tensor& want,
    float8::Recipe recipe) {
  const auto check = [&](const float8::Plane& plane, const at::Tensor& exact) {
    const at::Tensor got =
        float8::dequantize(plane, recipe).cpu().narrow(1, 0, exact.size(1));
    // Beside the relative error half of the least subnormal: 2^-10 of 448 is
    // the largest part of amax that it can be.
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
