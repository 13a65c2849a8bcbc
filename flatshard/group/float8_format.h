#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "flatshard/float8/recipe.h"
#include "flatshard/layout/flat_layout.h"
#include "flatshard/schedule/plane_set.h"
#include "flatshard/shape/group_shape.h"

namespace flatshard {

/// How the weights of a group become FP8. Two planes are read: rows by the
/// matmuls of the forward, columns by the matmuls for the gradient of the
/// input. See docs/guides/fp8.md.
struct Float8Format {
  float8::Recipe recipe = float8::Recipe::tensorwise;
  /// The rounding of scales that are powers of two (rowwise and mxfp8).
  float8::Rounding rounding = float8::Rounding::up;
  /// Columns are quantized from main weights and all-gathered. Otherwise each
  /// rank derives them from the rows that it all-gathered. Applies to rowwise
  /// and mxfp8; with the other recipes both planes contain the same numbers.
  bool stored_columns = false;
  /// Unless full units are all-gathered, each parameter is a part
  /// (UnitSpec::part_nbytes), at the cost of padding for each.
  GatherParts gather_parts = GatherParts::recomputed;

  /// If the GPU does not support the recipe: dequantize and multiply in
  /// bfloat16. CPUs always do that.
  bool emulate = false;

  float8::Quantizer quantizer() const {
    return {.recipe = recipe, .rounding = rounding};
  }
  /// Returns the number of elements of a scale that is stored next to its
  /// elements in the flat space; 0: each rank has all scales.
  std::int64_t block_of_stored_scales() const {
    const float8::RecipeTraits traits = float8::traits_of(recipe);
    return traits.scales_are_sharded ? traits.block_inner : 0;
  }

  /// Returns whether columns have the scales of rows, transposed.
  bool transposes_scales() const {
    const float8::RecipeTraits traits = float8::traits_of(recipe);
    return traits.rows_share_scales() && !traits.has_one_scale();
  }

  // Needs of a group's layout.

  /// Returns the part of each of `num_parameters` parameters.
  std::vector<std::int64_t> parts_of(std::int64_t num_parameters) const;
  /// Returns the alignment of a layout's tensors and shards, in elements;
  /// `least` or more.
  std::int64_t alignment(std::int64_t least) const;
  /// Returns the granularity of weights.
  Granularity granularity() const;

  /// Returns where the scales of these weights are, and what else of the format
  /// the planes of a group depend on.
  /// @param weights  matrices.
  Float8Shape shape_of(const std::vector<TensorSpec>& weights) const;

  /// Returns why a parameter of this shape stays in Precision::compute, e.g.
  /// "20 columns are not a multiple of 16"; empty when it can be FP8.
  std::string why_not(std::span<const std::int64_t> shape) const;

  bool operator==(const Float8Format&) const = default;
};

}  // namespace flatshard
