#pragma once

#include <utility>
#include <vector>

#include "check.h"
#include "flatshard/float8/float8_matmul.h"

// Matmuls of quantized operands, and the same in float64.
namespace flatshard::float8 {

/// Recipes of a and b that multiply.
inline const std::vector<std::pair<Recipe, Recipe>> kPairs{
    {Recipe::tensorwise, Recipe::tensorwise},
    {Recipe::rowwise, Recipe::rowwise},
    {Recipe::blockwise_1x128, Recipe::blockwise},
    {Recipe::blockwise_1x128, Recipe::blockwise_1x128},
    {Recipe::mxfp8, Recipe::mxfp8}};

/// Returns a row plane of [outer, inner] values.
inline Operand operand(
    std::int64_t outer,
    std::int64_t inner,
    Recipe recipe,
    at::Device device,
    std::uint64_t seed,
    Format format = Format::e4m3) {
  const at::Tensor x = at::randn({outer, inner}, seeded(seed));
  return {quantize(x.to(device), {recipe, format}), recipe};
}

struct Exact {
  at::Tensor product;     ///< float64 [m, n]
  at::Tensor magnitudes;  ///< sums of |a| |b|: what rounding is relative to
};

inline Exact exact(const Operand& a, const Operand& b) {
  const auto values = [](const Operand& o) {
    return dequantize(o.plane, o.recipe).cpu().to(at::kDouble);
  };
  const at::Tensor x = values(a), y = values(b).t();
  return {x.mm(y), x.abs().mm(y.abs())};
}

/// `|got - want|` <= of_sums * sums of magnitudes + half an ulp of got's dtype.
inline void expect_product(
    const at::Tensor& got,
    const at::Tensor& want,
    const at::Tensor& magnitudes,
    double of_sums) {
  const double ulp = got.scalar_type() == at::kBFloat16 ? 0x1p-8 : 0x1p-24;
  const at::Tensor error = (got.cpu().to(at::kDouble) - want).abs();
  const at::Tensor bound = magnitudes * of_sums + want.abs() * ulp + 1e-30;
  EXPECT_LE((error / bound).max().item<double>(), 1.0);
}

}  // namespace flatshard::float8
