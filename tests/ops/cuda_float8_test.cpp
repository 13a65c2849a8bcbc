#include <gtest/gtest.h>

#include "flatshard/device/stream.h"
#include "flatshard/ops/cuda_ops.h"
#include "flatshard/ops/float8/float8_fused.h"
#include "flatshard/ops/rms_norm_rows.h"
#include "tests/ops/float8_oracles.h"

// Fused kernels give planes that equal, bit for bit, the planes of the values
// that the plain kernels store, and near float32. Skips itself without a GPU.
namespace flatshard::nn {
namespace {

class CudaFloat8 : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU, or a build without CUDA";
    }
  }
  static void expect_planes(
      const Float8RowsAndColumns& got,
      const at::Tensor& stored,
      const float8::Quantizer& q,
      std::int64_t multiple,
      const char* what) {
    const auto [rows, columns] = float8::quantize_both(stored, q, multiple);
    const auto same = [&](const float8::Plane& a, const float8::Plane& b) {
      EXPECT_EQ(a.data.sizes(), b.data.sizes()) << what;
      EXPECT_TRUE(at::equal(a.data.view(at::kByte), b.data.view(at::kByte)))
          << what << ": data";
      EXPECT_EQ(a.scales.strides(), b.scales.strides()) << what;
      EXPECT_TRUE(at::equal(a.scales.to(at::kFloat), b.scales.to(at::kFloat)))
          << what << ": scales";
    };
    same(got.rows, rows);
    same(got.columns, columns);
  }
};

void check_all(
    std::int64_t rows,
    std::int64_t dim,
    const float8::Quantizer& q,
    std::int64_t multiple,
    const std::function<void(
        const Float8RowsAndColumns&,
        const at::Tensor&,
        const at::Tensor&,
        const char*)>& expect) {
  const Float8Inputs in(rows, dim, at::kCUDA, at::kBFloat16);
  const at::Tensor gate = in.gate.contiguous(), up = in.up.contiguous();
  expect(
      swiglu_float8(in.gate, in.up, q, {.multiple = multiple}),
      cuda::swiglu_forward(gate, up),
      in.product(),
      "swiglu");
  const auto [dgate, dup] = cuda::swiglu_backward(in.dy, gate, up, nullptr);
  expect(
      swiglu_backward_float8(in.dy, in.gate, in.up, q, {.multiple = multiple}),
      at::cat({dgate, dup}, 1),
      in.product_gradient(),
      "swiglu backward");
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    const at::Tensor weight = in.weight.to(dtype);
    const auto [y, sum, rstd] = rms_norm_rows(gate, up, weight, 1e-5);
    const NormFloat8 norm =
        rms_norm_float8(gate, up, weight, 1e-5, q, {.multiple = multiple});
    expect(norm.planes, y, in.norm(), "add and norm");
    EXPECT_TRUE(at::equal(norm.sum, sum));
    EXPECT_TRUE(at::equal(norm.rstd, rstd));
  }
  const auto [y, sum, rstd] = rms_norm_rows(gate, {}, in.weight, 1e-5);
  const NormFloat8 norm =
      rms_norm_float8(gate, {}, in.weight, 1e-5, q, {.multiple = multiple});
  expect(norm.planes, y, {}, "norm");
}

TEST_F(CudaFloat8, PlanesAreThoseOfStoredValues) {
  for (const float8::Quantizer& q : float8_quantizers()) {
    for (const auto& [rows, dim] :
         {std::pair{128, 128}, {256, 512}, {384, 2048}}) {
      SCOPED_TRACE(
          std::string(to_string(q.recipe)) + " " + std::to_string(rows));
      check_all(
          rows,
          dim,
          q,
          1,
          [&](const Float8RowsAndColumns& got,
              const at::Tensor& stored,
              const at::Tensor& exact,
              const char* what) {
            expect_planes(got, stored, q, 1, what);
            if (exact.defined()) {
              SCOPED_TRACE(what);
              expect_near(got, exact, q.recipe);
            }
          });
    }
  }
}

TEST_F(CudaFloat8, SinglePlanesAreThoseOfBoth) {
  for (const float8::Quantizer& q : float8_quantizers()) {
    SCOPED_TRACE(to_string(q.recipe));
    for (const auto& [rows, dim] : {std::pair{128, 512}, {384, 2048}}) {
      expect_single_planes(
          Float8Inputs(rows, dim, at::kCUDA, at::kBFloat16),
          q,
          q.recipe == float8::Recipe::blockwise ? 1 : 16);
    }
  }
}

TEST_F(CudaFloat8, NumbersOfTokensThatFillNoTile) {
  for (const float8::Quantizer& q : float8_quantizers()) {
    if (q.recipe == float8::Recipe::blockwise) {
      continue;
    }
    for (const std::int64_t rows : {1, 77, 200}) {
      SCOPED_TRACE(
          std::string(to_string(q.recipe)) + " " + std::to_string(rows));
      check_all(
          rows,
          384,
          q,
          128,
          [&](const Float8RowsAndColumns& got,
              const at::Tensor& stored,
              const at::Tensor&,
              const char* what) { expect_planes(got, stored, q, 128, what); });
    }
  }
}

TEST_F(CudaFloat8, AmaxIsThatOfWhatIsStored) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    for (const auto& [rows, dim] :
         {std::pair{1, 8}, {77, 100}, {300, 2048}, {5, 7}}) {
      const Float8Inputs in(rows, dim, at::kCUDA, dtype);
      const auto largest = [](const at::Tensor& t) {
        return t.abs().max().item<float>();
      };
      const auto [y, of_y] = swiglu_amax(in.gate, in.up);
      EXPECT_EQ(of_y.item<float>(), largest(y));
      const auto [dgate, dup, of_gradient] =
          swiglu_backward_amax(in.dy, in.gate, in.up);
      const at::Tensor dy = in.dy.clone();
      const auto [over_dy, dup2, amax2] =
          swiglu_backward_amax(dy, in.gate, in.up, /*gives_up_dy=*/true);
      EXPECT_TRUE(over_dy.is_alias_of(dy));
      EXPECT_TRUE(at::equal(over_dy, dgate));
      EXPECT_TRUE(at::equal(dup2, dup));
      EXPECT_EQ(of_gradient[0].item<float>(), largest(dgate));
      EXPECT_EQ(of_gradient[1].item<float>(), largest(dup));
      const auto [normed, sum, rstd] =
          rms_norm_rows(in.gate, in.up, in.weight, 1e-5);
      const auto [dx, dw, of_dx] =
          rms_norm_backward_amax(in.dy, in.up, sum, in.weight, rstd);
      EXPECT_EQ(of_dx.item<float>(), largest(dx));
      const auto [dx2, dw2] =
          rms_norm_rows_backward(in.dy, in.up, sum, in.weight, rstd);
      EXPECT_TRUE(at::equal(dx, dx2));
      EXPECT_TRUE(at::equal(dw, dw2));
    }
  }
  // NaN and Inf are found.
  Float8Inputs in(64, 128, at::kCUDA, at::kBFloat16);
  in.gate[3][5] = NAN;
  EXPECT_TRUE(
      std::isnan(std::get<1>(swiglu_amax(in.gate, in.up)).item<float>()));
}

}  // namespace
}  // namespace flatshard::nn
