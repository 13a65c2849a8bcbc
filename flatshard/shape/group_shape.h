#pragma once

#include "flatshard/layout/flat_layout.h"
#include "flatshard/layout/strategy.h"
#include "flatshard/schedule/plane_set.h"

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

/// Bytes of an element of each representation of weights and gradients.
struct ElementSizes {
  std::int64_t main = 4;  ///< in a frozen group: as `compute`
  std::int64_t compute = 2;
  std::int64_t reduce = 4;
  /// The gradient has this size between the backward and the optimizer.
  std::int64_t gradient = 4;
  std::int64_t accumulated = 4;  ///< sums of microbatches before that

  bool operator==(const ElementSizes&) const = default;
};

/// The mesh of a group as numbers, outermost axis first.
struct MeshShape {
  std::vector<std::int64_t> sizes;
  /// Number of model ranks between adjacent ranks of each axis.
  std::vector<std::int64_t> strides;
  std::int64_t model_ranks = 1;  ///< in the mesh of the full model
  /// The first axis is also the first one of the model's mesh.
  bool has_outer_axis = true;

  std::int64_t num_ranks() const {
    std::int64_t ranks = 1;
    for (const std::int64_t size : sizes) {
      ranks *= size;
    }
    return ranks;
  }

  bool operator==(const MeshShape&) const = default;
};

/// The size of a row of float32 scales is a multiple of this.
inline constexpr std::int64_t kScaleMultiple = 4;

/// How the weights of a group become FP8, as numbers.
struct Float8Shape {
  std::string recipe;  ///< its name in messages and tables of GPUs
  /// Each plane has its own scales in each segment, one for each `block`
  /// elements; 0: each rank has all scales.
  std::int64_t sharded_scales_block = 0;
  /// The offsets where the scales of each parameter's rows and columns start,
  /// among the scales that every rank has.
  std::vector<std::array<std::int64_t, 2>> scale_offsets;
  std::int64_t num_scales = 0;  ///< float32, those that every rank has
  /// Columns are quantized from main weights and all-gathered. Otherwise each
  /// rank derives them from the rows that it all-gathered.
  bool stored_columns = false;
  /// Derived columns have their own scales, stored after them in the slot.
  bool scales_behind_columns = false;
  GatherParts gather_parts = GatherParts::recomputed;
};

/// Parameters of a unit that are sharded alike: the properties of a ParamGroup
/// before it has memory.
struct GroupShape {
  std::vector<TensorSpec> tensors;
  std::int64_t alignment = kLayoutAlignment;
  Strategy strategy;
  MeshShape mesh;
  ElementSizes sizes;
  /// Main weights have the dtype of compute weights.
  bool main_has_compute_dtype = false;
  /// false: only weights in the compute dtype or FP8, without gradients.
  bool trainable = true;
  // ParamGroupOptions explains these.
  bool keep_compute_weights = true;
  bool offload = false;
  bool has_weights = true;
  std::int64_t post_forward_ranks = 0;
  std::optional<Float8Shape> float8;
};

}  // namespace flatshard
