#pragma once

#include "flatshard/nn/weight_source.h"
#include "flatshard/shape/unit_plan.h"
#include "flatshard/unit/slot_view.h"
#include "flatshard/unit/unit_parameter.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

/// The unsharded weights of a unit: the planes of its groups joined, their
/// places in slots, and the code that fills a slot.
class UnitWeights {
 public:
  /// @param unit    its name, for messages.
  /// @param groups  outlive this.
  UnitWeights(const std::string& unit, const UnitGroups& groups);

  /// Returns the places of planes and gradients in slots.
  const UnitLayout& layout() const { return layout_; }
  /// Returns the description of planes for the Scheduler, and their slices.
  const UnitSpec& planes() const { return layout_.slots; }
  /// Returns whether layers request some of the planes.
  bool has_planes_on_request() const { return !planes().on_request.empty(); }
  /// Returns the bytes of the slot for a plane, or a part of one, of all groups
  /// that are not resident.
  std::int64_t nbytes(PlaneId plane, PartId part) const {
    return planes().nbytes(plane, part);
  }
  /// Returns the bytes of the slot for this rank's post-forward shards; 0: it
  /// has none.
  std::int64_t post_forward_nbytes() const {
    return planes().post_forward == kNoPlane
               ? 0
               : planes().weights_nbytes[planes().post_forward];
  }
  /// Returns whether every rank stores all weights of all groups.
  bool resident() const { return planes().resident; }
  /// Returns whether the plane has no slot.
  bool rests(PlaneId plane) const {
    return resident() && !planes().transient.contains(plane);
  }
  /// Rises with every change of the weights.
  std::int64_t generation() const;

  /// Returns where a parameter starts in the slot of kComputePlane, in bytes.
  std::int64_t offset(const UnitParameter& parameter) const;
  /// All-gathers a plane of all groups, or a part of one, into `slot`. Inside
  /// Stream::submit.
  /// @param gathers  by group; those that are not in the plane are not used.
  /// @param shards  the slot of UnitSpec::post_forward: the source for groups
  /// with such a shard; null: the stored shards.
  void gather_into(
      const SlotView& slot,
      PlaneId plane,
      PartId part,
      const std::vector<WeightPlanes::Gather>& gathers,
      const SlotView& shards) const;
  /// Fills the slot of UnitSpec::post_forward, on the current stream.
  /// @param slot  the slot of kComputePlane.
  void save_post_forward(const SlotView& slot, const SlotView& shards) const;
  /// Derives a plane, or a part of it, from its unsharded source.
  void derive_into(
      const SlotView& slot,
      PlaneId plane,
      PartId part,
      const SlotView& source) const;
  /// Returns the part that has the parameter; kWhole where there are none.
  PartId part_of(const UnitParameter& parameter) const;

  // The requests of layers (nn::WeightSource).

  /// Absent: the parameter points at its values.
  std::optional<nn::WeightRecipe> recipe(const UnitParameter& parameter) const;
  /// Returns the plane of a matmul with the parameter. It must have a recipe.
  PlaneId plane_of(const UnitParameter& parameter, nn::PlaneUse use) const;
  /// The parameter as it is in a slot.
  /// @param slot  contains `part` of the plane; resident groups use none.
  PlaneView view(
      const UnitParameter& parameter,
      PlaneId plane,
      PartId part,
      const SlotView& slot) const;
  /// Returns the same as one matmul reads it.
  nn::EncodedWeight
  operand(const UnitParameter& parameter, PlaneId plane, PlaneView view) const;

 private:
  /// Returns the PostForwardShard of group `g` in the slot of
  /// UnitSpec::post_forward.
  at::Tensor post_forward_slot(std::size_t g, const SlotView& shards) const;
  /// Returns whether group `g` has some of it.
  bool is_in(std::size_t g, PlaneId plane, PartId part) const {
    return groups_[g]->weights().has(plane) &&
           (part == kWhole || layout_.parts[part].group == g);
  }
  /// Returns the number in its group's count.
  PartId part_in_group(PartId part) const {
    return part == kWhole ? kWhole : layout_.parts[part].part;
  }
  /// Returns the memory of group `g` for a plane or a part of one: in the slot,
  /// or in its storage.
  at::Tensor
  memory(std::size_t g, PlaneId plane, PartId part, const SlotView& slot) const;

  const UnitGroups& groups_;
  UnitLayout layout_;
};

}  // namespace flatshard
