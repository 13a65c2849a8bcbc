#pragma once

#include <cstdint>
#include <string_view>

#include "flatshard/float8/formats.h"

namespace flatshard::float8 {

/// Which elements share a scale, and what kind of number it is. In a product
/// of [outer, inner] operands the inner dimension is summed over.
enum class Recipe : std::uint8_t {
  tensorwise,       ///< the whole tensor; float32, largest / amax
  rowwise,          ///< a row of inner elements; float32, a power of two
  blockwise,        ///< 128 x 128; float32, largest / amax
  blockwise_1x128,  ///< 128 inner elements; float32, largest / amax
  mxfp8,            ///< 32 inner elements; E8M0
};

inline constexpr std::int64_t kBlock = 128;
inline constexpr std::int64_t kMxBlock = 32;

/// How a tensor becomes FP8.
struct Quantizer {
  Recipe recipe = Recipe::tensorwise;
  Format format = Format::e4m3;
  Rounding rounding = Rounding::up;  ///< of scales that are powers of two
};

/// Whether scales are powers of two, so that `rounding` counts.
FLATSHARD_HOST_DEVICE constexpr bool has_power_of_two_scales(Recipe recipe) {
  return recipe == Recipe::rowwise || recipe == Recipe::mxfp8;
}

std::string_view to_string(Recipe recipe);
std::string_view to_string(Format format);
std::string_view to_string(Rounding rounding);
/// @throws Error{config} that names the nearest recipe.
Recipe recipe_of(std::string_view name);
/// "floor" or "up". @throws Error{config}
Rounding rounding_of(std::string_view name);
/// "e4m3" or "e5m2". @throws Error{config}
Format format_of(std::string_view name);

}  // namespace flatshard::float8
