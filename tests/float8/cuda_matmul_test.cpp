#include "flatshard/core/error.h"
#include "flatshard/device/stream.h"
#include "products.h"

// cuBLASLt's matmuls against float64. Skips itself without a GPU.
namespace flatshard::float8 {
namespace {

// Hopper's tensor cores truncate sums of FP8 products to 13 bits. Without fast
// accumulation that happens four times, for 32 products each, before the sum of
// 128 is added in float32: 4 * 2^-13.
constexpr double kSums = 0x1p-11;
constexpr double kFastSums = 0x1p-9;
// Decoded operands whose scales are not powers of two are rounded to bfloat16.
constexpr double kDecoded = 2 * 0x1p-9;

class Float8Matmul : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU, or a build without CUDA";
    }
  }

  static double sums_of(Recipe recipe, bool fast, at::Device device) {
    const bool rounded =
        !multiplies(recipe, device) && !has_power_of_two_scales(recipe);
    return (fast ? kFastSums : kSums) + (rounded ? kDecoded : 0.0);
  }

  // An algorithm may round a bfloat16 result before it accumulates it.
  static at::Tensor with_a_rounding_more(
      const Exact& want,
      at::ScalarType dtype,
      double of_sums) {
    const double ulp = dtype == at::kBFloat16 ? 0x1p-8 : 0.0;
    return want.magnitudes + want.product.abs() * (ulp / of_sums);
  }

  void expect_right(
      const Operand& a,
      const Operand& b,
      at::ScalarType dtype,
      bool fast = false) {
    const std::int64_t m = a.plane.data.size(0), n = b.plane.data.size(0);
    const Exact want = exact(a, b);
    const double of_sums = sums_of(a.recipe, fast, device_);
    MatmulOptions options{.fast_accumulation = fast, .emulate = true};
    at::Tensor out =
        at::full({m, n}, NAN, at::TensorOptions(device_).dtype(dtype));
    matmul(out, a, b, options);
    expect_product(out, want.product, want.magnitudes, of_sums);
    const at::Tensor first = out.cpu().to(at::kDouble);
    const at::Tensor magnitudes = with_a_rounding_more(want, dtype, of_sums);
    options.accumulate = true;
    matmul(out, a, b, options);
    expect_product(
        out,
        first + want.product,
        magnitudes + first.abs(),
        of_sums);
    options.accumulate = false;
    options.addend = at::randn({m, n}, out.options());
    matmul(out, a, b, options);
    expect_product(
        out,
        options.addend.cpu().to(at::kDouble) + want.product,
        magnitudes,
        of_sums);
  }

  at::Device device_{at::kCUDA, 0};
};

TEST_F(Float8Matmul, EveryPairOfRecipes) {
  for (const auto& [ra, rb] : kPairs) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const auto& [m, n, k] :
           {std::tuple{128, 256, 512}, {1024, 512, 2048}, {4096, 128, 128}}) {
        SCOPED_TRACE(
            std::string(to_string(ra)) + " " + std::string(to_string(rb)) +
            " " + c10::toString(dtype) + " " + std::to_string(m));
        expect_right(
            operand(m, k, ra, device_, 1),
            operand(n, k, rb, device_, 2),
            dtype);
      }
    }
  }
}

TEST_F(Float8Matmul, AnyNumberOfTokens) {
  for (const auto& [ra, rb] : kPairs) {
    for (const std::int64_t m : {1, 2, 7, 8, 77, 130, 1001}) {
      SCOPED_TRACE(
          std::string(to_string(ra)) + " " + std::string(to_string(rb)) + " " +
          std::to_string(m));
      expect_right(
          operand(m, 512, ra, device_, 1),
          operand(256, 512, rb, device_, 2),
          at::kBFloat16);
    }
  }
}

TEST_F(Float8Matmul, FormatsAndFastAccumulation) {
  for (const Recipe recipe : {Recipe::tensorwise, Recipe::rowwise}) {
    for (const bool fast : {false, true}) {
      for (const auto& [fa, fb] :
           {std::pair{Format::e4m3, Format::e4m3},
            {Format::e5m2, Format::e4m3},
            {Format::e4m3, Format::e5m2}}) {
        SCOPED_TRACE(to_string(recipe));
        expect_right(
            operand(256, 1024, recipe, device_, 1, fa),
            operand(512, 1024, recipe, device_, 2, fb),
            at::kBFloat16,
            fast);
      }
    }
  }
}

// Computes dw of tokens that fill no block, into a slot whose rows have gaps.
TEST_F(Float8Matmul, WeightGradients) {
  for (const Recipe recipe :
       {Recipe::tensorwise, Recipe::rowwise, Recipe::blockwise_1x128}) {
    SCOPED_TRACE(to_string(recipe));
    const at::Tensor x = at::randn({1000, 384}, seeded(1)).to(device_);
    const at::Tensor dy = at::randn({1000, 256}, seeded(2)).to(device_);
    const std::int64_t multiple = recipe == Recipe::blockwise_1x128 ? 128 : 16;
    const Operand a{quantize_both(dy, {recipe}, multiple).second, recipe};
    const Operand b{quantize_both(x, {recipe}, multiple).second, recipe};
    const Exact want = exact(a, b);
    at::Tensor slot = at::zeros({256, 512}, x.options());
    at::Tensor out = slot.narrow(1, 64, 384);
    matmul(out, a, b, {.accumulate = true, .emulate = true});
    matmul(out, a, b, {.accumulate = true, .emulate = true});
    expect_product(
        out,
        2 * want.product,
        2 * want.magnitudes,
        sums_of(recipe, false, device_));
    EXPECT_EQ(slot.narrow(1, 0, 64).count_nonzero().item<int>(), 0);
  }
}

TEST_F(Float8Matmul, WhatDoesNotFitIsNamed) {
  const auto problem =
      [&](Recipe recipe, std::int64_t n, std::int64_t k, bool emulate = true) {
        at::Tensor out = at::empty({64, n}, at::TensorOptions(device_));
        try {
          matmul(
              out,
              operand(64, k, recipe, device_, 1),
              operand(n, k, recipe, device_, 2),
              {.emulate = emulate});
        } catch (const Error& error) {
          return error.message();
        }
        return std::string("no error");
      };
  EXPECT_NE(
      problem(Recipe::tensorwise, 64, 40).find("k divisible by 16"),
      std::string::npos);
  EXPECT_NE(
      problem(Recipe::rowwise, 40, 64).find("n by 16"),
      std::string::npos);
  for (const Recipe recipe :
       {Recipe::tensorwise, Recipe::rowwise, Recipe::mxfp8}) {
    const std::string refused = problem(recipe, 64, 64, /*emulate=*/false);
    const std::string want =
        multiplies(recipe, device_)
            ? "no error"
            : "does not multiply " + std::string(to_string(recipe));
    EXPECT_NE(refused.find(want), std::string::npos) << refused;
  }
}

}  // namespace
}  // namespace flatshard::float8
