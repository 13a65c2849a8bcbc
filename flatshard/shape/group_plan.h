#pragma once

#include "flatshard/shape/storage_plan.h"

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace flatshard {

/// Adjacent segments of a plane's layout that are all-gathered together: all of
/// it, or a run that can be all-gathered separately.
struct PlanePart {
  std::int64_t first_parameter = 0;
  std::int64_t num_parameters = 0;
  std::int64_t first_segment = 0;
  std::int64_t num_segments = 0;
  std::int64_t offset = 0;  ///< of the first element, in the plane's layout
  std::shared_ptr<const FlatLayout> layout;  ///< of only these segments
  std::int64_t nbytes = 0;                   ///< of its slot
};

/// One representation of a group's weights for kernels to read. Its index in
/// GroupPlan::planes is its PlaneId.
struct PlaneShape {
  std::string_view name;
  /// The unsharded plane that each rank derives it from. kStored: it is encoded
  /// from main weights and all-gathered.
  PlaneId source = kStored;
  /// Its readers: matmuls that sum over a weight's rows, over its columns, or
  /// both.
  bool in_forward = true;
  bool in_backward = true;
  /// Layers request it (nn::WeightSource); no parameter points at it.
  bool on_request = false;

  /// Null: the plane has nothing of this group.
  std::shared_ptr<const FlatLayout> layout;
  PlanePart whole;
  std::vector<PlanePart> parts;  ///< by PartId; none: no all-gather by parts

  bool empty() const { return layout == nullptr; }
  bool stored() const { return !empty() && source == kStored; }
  const PlanePart& part(PartId id) const {
    return id == kWhole ? whole : parts.at(id);
  }
};

/// The bytes that a rank keeps of a group between its uses.
struct GroupBytes {
  std::int64_t main = 0;  ///< without those that drop_main_weights drops
  std::int64_t compute = 0;
  std::int64_t resting = 0;    ///< of `compute`: planes between all-gathers
  std::int64_t gradients = 0;  ///< for the optimizer
  /// Gradients between the microbatches of a step: not yet reduced over the
  /// outer axes, or not at all. A unit's reductions decide which there are.
  std::int64_t inner = 0;
  std::int64_t local = 0;
  std::int64_t numel = 0;  ///< of the optimizer's shard; 0: it has none

  bool operator==(const GroupBytes&) const = default;
  GroupBytes& operator+=(const GroupBytes& other) {
    main += other.main;
    compute += other.compute;
    resting += other.resting;
    gradients += other.gradients;
    inner += other.inner;
    local += other.local;
    numel += other.numel;
    return *this;
  }
};

/// A group with its layout and planes, and what follows from it: all that there
/// is of a ParamGroup without memory.
///
/// Without FP8 the one plane has the group in its compute dtype. With FP8 there
/// are rows for the forward and columns for the backward, in bytes, and
/// kComputePlane is empty.
struct GroupPlan {
  GroupPlan() = default;
  /// @throws Error{config} as FlatLayout::build.
  explicit GroupPlan(GroupShape shape);

  GroupShape shape;
  StoragePlan storage;
  std::shared_ptr<const FlatLayout> layout;  ///< of elements
  /// The layout of a stored plane: with sharded scales each segment's scales
  /// follow it.
  std::shared_ptr<const FlatLayout> plane_layout;
  std::vector<PlaneShape> planes;  ///< by PlaneId; at least one

  bool has(PlaneId plane) const {
    return plane < static_cast<PlaneId>(planes.size()) &&
           !planes[plane].empty();
  }
  /// Returns whether the plane needs no slot, since a rank stores all of it.
  bool rests_whole(PlaneId plane) const {
    return storage.resident() && planes[plane].stored();
  }
  /// Returns whether a rank keeps a shard from forward to backward: see
  /// ParamGroupOptions::post_forward_ranks.
  bool has_post_forward() const;
  /// Returns its elements; 0 without one.
  std::int64_t post_forward_numel() const;
  /// Returns the bytes of the scales that follow these parameters' columns in a
  /// slot.
  std::int64_t nbytes_behind(std::int64_t first, std::int64_t count) const;
  /// Returns whether the slice of the stored planes that belongs to main
  /// weights is a view of them; otherwise it has separate memory.
  bool shard_is_view() const {
    return !storage.spreads || plane_layout->segments().size() == 1;
  }
  /// Returns whether FP8 planes can replace the main weights permanently: see
  /// drop_main_weights.
  bool can_drop_main() const {
    return !shape.trainable && shape.float8 && shape.keep_compute_weights;
  }
  GroupBytes bytes() const;

 private:
  PlanePart part_of(
      std::int64_t first_parameter,
      std::int64_t num_parameters,
      bool with_scales_behind) const;
  PlaneShape compute_plane() const;
  PlaneShape float8_plane(bool is_rows) const;
};

}  // namespace flatshard
