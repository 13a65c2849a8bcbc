#pragma once

#include "flatshard/layout/flat_layout.h"
#include "flatshard/layout/strategy.h"
#include "flatshard/schedule/events.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace flatshard::plan {

/// Slots, and what stands in them, begin at multiples of so many bytes.
inline constexpr std::int64_t kSlotMultiple = 256;

/// Bytes of an element of each representation of weights and gradients.
struct ElementSizes {
  std::int64_t main = 4;
  std::int64_t compute = 2;
  std::int64_t reduce = 4;
  /// The gradient has this size between the backward and the optimizer.
  std::int64_t gradient = 4;

  bool operator==(const ElementSizes&) const = default;
};

/// How the weights of a group become FP8: what Float8Codec makes of a recipe.
struct Float8Shape {
  std::string recipe;  ///< as Gpu::float8 names it
  /// Each plane has its own scales in each segment, one for each `block`
  /// elements; 0: each rank has all scales.
  std::int64_t sharded_scales_block = 0;
  /// By parameter: how many float32 scales its rows have on each rank.
  std::vector<std::int64_t> rows_scales;
  /// Those of its columns; empty: columns share the scales of the rows.
  std::vector<std::int64_t> columns_scales;
  bool stored_columns = false;
  /// Derived columns have their own scales, which follow them in the slot.
  bool scales_behind_columns = false;
  GatherParts gather_parts = GatherParts::recomputed;

  bool operator==(const Float8Shape&) const = default;
};

/// Parameters of a unit that are sharded alike: what a ParamGroup is made of,
/// without memory.
struct GroupShape {
  std::vector<TensorSpec> tensors;
  LayoutOptions layout;
  Strategy strategy;
  std::vector<std::int64_t> axis_sizes;  ///< of the group's mesh
  /// How many ranks of the model are between neighbours of each axis.
  std::vector<std::int64_t> axis_strides;
  ElementSizes sizes;
  /// false: weights in the compute dtype or FP8 alone, without gradients.
  bool trainable = true;
  /// These mean what they mean in ParamGroupOptions.
  bool keep_compute_weights = true;
  std::int64_t post_forward_ranks = 0;
  std::optional<Float8Shape> float8;
};

/// A unit before it has memory.
struct UnitShape {
  std::string name;
  UnitId parent = kNoUnit;
  std::vector<GroupShape> groups;
  UnitPolicy policy;
};

/// What a rank keeps of a group between its uses, in bytes.
struct GroupBytes {
  std::int64_t main = 0;
  std::int64_t compute = 0;
  std::int64_t resting = 0;  ///< of `compute`: planes between gathers
  std::int64_t gradients = 0;
  std::int64_t numel = 0;  ///< of the optimizer's shard; 0: it has none

  GroupBytes& operator+=(const GroupBytes& other) {
    main += other.main;
    compute += other.compute;
    resting += other.resting;
    gradients += other.gradients;
    numel += other.numel;
    return *this;
  }
};

/// A group with its layout, and what follows from it.
struct GroupPlan {
  /// @throws Error{config} as FlatLayout::build.
  explicit GroupPlan(GroupShape shape);

  GroupShape shape;
  FlatLayout layout;        ///< of elements
  FlatLayout plane_layout;  ///< of a stored plane
  GroupBytes bytes;
  bool resident = false;     ///< weights are whole on every rank
  bool has_refresh = false;  ///< see WeightPlanes::has_refresh
  /// The outer axis is reduced apart from the inner ones, on a stream of its
  /// own: see GradientPipeline::has_outer_stage.
  bool has_outer_stage = false;
  /// Elements of the post-forward shard; 0: the group has none.
  std::int64_t post_forward_numel = 0;
};

/// A unit with its groups, and what the Scheduler is told of it.
struct UnitPlan {
  explicit UnitPlan(const UnitShape& shape);

  std::vector<GroupPlan> groups;
  UnitSpec spec;
};

}  // namespace flatshard::plan
