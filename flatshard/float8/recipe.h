#pragma once

#include <cstdint>
#include <string_view>

#include "flatshard/float8/formats.h"

namespace flatshard::float8 {

/// Which elements share a scale, and what kind of number it is. In a matmul of
/// [outer, inner] operands the inner dimension is summed over.
enum class Recipe : std::uint8_t {
  tensorwise,       ///< the entire tensor; float32, largest / amax
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

/// The kind of number that a scale is.
enum class ScaleKind : std::uint8_t {
  largest_over_amax,  ///< float32
  power_of_two,       ///< float32
  e8m0,               ///< a power of two in one byte
};

/// A recipe as data: code that depends on a recipe reads one of these.
struct RecipeTraits {
  /// Elements that share a scale, in a plane [outer, inner]. 0: as many as
  /// there are.
  std::int64_t block_outer = 0;
  std::int64_t block_inner = 0;
  ScaleKind scale = ScaleKind::largest_over_amax;
  /// If a weight is sharded, its scales are sharded like its elements. false:
  /// each rank has all scales.
  bool scales_are_sharded = false;
  /// Rows and columns of a weight, and the tokens that a matmul sums over, are
  /// multiples of it.
  std::int64_t multiple = 16;
  /// The format of gradients of activations.
  Format gradient = Format::e4m3;
  /// The recipe of activations that such weights are multiplied by, and of
  /// single rows of a weight.
  Recipe activations = Recipe::tensorwise;
  bool for_weights = true;

  /// Returns whether one scale serves the entire tensor, so that its largest
  /// magnitude must be found first.
  FLATSHARD_HOST_DEVICE constexpr bool has_one_scale() const {
    return block_outer == 0 && block_inner == 0;
  }
  /// Otherwise a block is a part of one row.
  FLATSHARD_HOST_DEVICE constexpr bool rows_share_scales() const {
    return block_outer != 1;
  }
};

FLATSHARD_HOST_DEVICE constexpr RecipeTraits traits_of(Recipe recipe) {
  switch (recipe) {
    case Recipe::rowwise:
      return {
          .block_outer = 1,
          .scale = ScaleKind::power_of_two,
          .activations = Recipe::rowwise};
    case Recipe::blockwise:
      return {
          .block_outer = kBlock,
          .block_inner = kBlock,
          .multiple = kBlock,
          .activations = Recipe::blockwise_1x128};
    case Recipe::blockwise_1x128:
      return {
          .block_outer = 1,
          .block_inner = kBlock,
          .multiple = kBlock,
          .activations = Recipe::blockwise_1x128,
          .for_weights = false};
    case Recipe::mxfp8:
      return {
          .block_outer = 1,
          .block_inner = kMxBlock,
          .scale = ScaleKind::e8m0,
          .scales_are_sharded = true,
          .multiple = kMxBlock,
          .activations = Recipe::mxfp8};
    default:
      // One scale for all needs range more than precision.
      return {.gradient = Format::e5m2, .activations = Recipe::tensorwise};
  }
}

/// Returns whether scales are powers of two, so that `rounding` counts.
FLATSHARD_HOST_DEVICE constexpr bool has_power_of_two_scales(Recipe recipe) {
  return traits_of(recipe).scale != ScaleKind::largest_over_amax;
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
