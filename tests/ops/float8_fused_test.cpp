#include "flatshard/ops/float8/float8_fused.h"

#include <gtest/gtest.h>

#include "flatshard/core/error.h"
#include "flatshard/nn/swiglu.h"
#include "flatshard/ops/rms_norm_rows.h"
#include "tests/nn/check.h"
#include "tests/ops/float8_oracles.h"

// The CPU's results are compared with float32, and the planes with planes of
// stored values.
namespace flatshard::nn {
namespace {

TEST(Float8Fused, EqualsFloat32WithinFp8) {
  for (const float8::Quantizer& q : float8_quantizers()) {
    SCOPED_TRACE(to_string(q.recipe));
    const Float8Inputs in(128, 256, at::kCPU, at::kBFloat16);
    expect_near(swiglu_float8(in.gate, in.up, q), in.product(), q.recipe);
    expect_near(
        swiglu_backward_float8(in.dy, in.gate, in.up, q),
        in.product_gradient(),
        q.recipe);
    const NormFloat8 norm = rms_norm_float8(in.gate, in.up, in.weight, 1e-5, q);
    expect_near(norm.planes, in.norm(), q.recipe);
    EXPECT_TRUE(at::equal(norm.sum, in.gate + in.up));
    EXPECT_LE(relative_error(norm.rstd, in.rstd()), 1e-5);
  }
}

TEST(Float8Fused, SinglePlanesAreThoseOfBoth) {
  for (const float8::Quantizer& q : float8_quantizers()) {
    SCOPED_TRACE(to_string(q.recipe));
    const Float8Inputs in(128, 256, at::kCPU, at::kBFloat16);
    expect_single_planes(in, q, q.recipe == float8::Recipe::blockwise ? 1 : 32);
  }
}

TEST(Float8Fused, AmaxIsThatOfWhatIsStored) {
  const Float8Inputs in(64, 96, at::kCPU, at::kBFloat16);
  const auto [y, of_y] = swiglu_amax(in.gate, in.up);
  EXPECT_EQ(of_y.item<float>(), y.abs().max().item<float>());
  EXPECT_TRUE(at::equal(y, swiglu(in.gate, in.up)));
  const auto [dgate, dup, of_gradient] =
      swiglu_backward_amax(in.dy, in.gate, in.up);
  EXPECT_EQ(of_gradient[0].item<float>(), dgate.abs().max().item<float>());
  EXPECT_EQ(of_gradient[1].item<float>(), dup.abs().max().item<float>());
  const auto [normed, sum, rstd] =
      rms_norm_rows(in.gate, in.up, in.weight, 1e-5);
  const auto [dx, dw, of_dx] =
      rms_norm_backward_amax(in.dy, in.up, sum, in.weight, rstd);
  EXPECT_EQ(of_dx.item<float>(), dx.abs().max().item<float>());
  const auto [dx2, dw2] =
      rms_norm_rows_backward(in.dy, in.up, sum, in.weight, rstd);
  EXPECT_TRUE(at::equal(dx, dx2));
  EXPECT_TRUE(at::equal(dw, dw2));
}

TEST(Float8Fused, ShapesThatDifferAreNamed) {
  const at::Tensor a = at::ones({4, 32}), b = at::ones({4, 64});
  EXPECT_THROW(swiglu_float8(a, b, {}), Error);
  EXPECT_THROW(swiglu_float8(a[0], a[0], {}), Error);
  EXPECT_THROW(swiglu_backward_float8(a, b, b, {}), Error);
}

}  // namespace
}  // namespace flatshard::nn
