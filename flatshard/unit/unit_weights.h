#pragma once

#include "flatshard/nn/weight_source.h"
#include "flatshard/schedule/events.h"
#include "flatshard/unit/slot_view.h"
#include "flatshard/unit/unit_parameter.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

/// The gathered weights of a unit: the planes of its groups joined, what lies
/// where in their slots, and how a slot is filled.
class UnitWeights {
 public:
  /// @param unit    its name, for messages.
  /// @param groups  outlive this.
  UnitWeights(const std::string& unit, const UnitGroups& groups);

  /// What the Scheduler is told of planes, and their slices.
  const UnitSpec& planes() const { return planes_; }
  /// Layers ask for some of the planes.
  bool has_planes_on_request() const { return !planes_.on_request.empty(); }
  /// Of the slot that holds a plane, or a part of one, of all groups that are
  /// not resident.
  std::int64_t nbytes(PlaneId plane, PartId part) const {
    return planes_.nbytes(plane, part);
  }
  /// Of the slot that holds this rank's post-forward shards; 0: it has none.
  std::int64_t post_forward_nbytes() const {
    return planes_.post_forward == kNoPlane
               ? 0
               : planes_.weights_nbytes[planes_.post_forward];
  }
  /// All groups' weights rest whole on every rank.
  bool resident() const { return resident_; }
  /// The plane has no slot.
  bool rests(PlaneId plane) const {
    return resident_ && !planes_.transient.contains(plane);
  }
  /// Rises with every change of the weights.
  std::int64_t generation() const;
  /// Sets what `spec` says of weights.
  void describe(UnitSpec& spec) const;

  /// Where a parameter begins in the slot of kComputePlane, in bytes.
  std::int64_t offset(const UnitParameter& parameter) const;
  /// Gathers a plane of all groups, or a part of one, into `slot`. Inside
  /// Stream::submit.
  /// @param gathers  by group; those that are not in the plane are not used.
  /// @param shards  the slot of UnitSpec::post_forward, from which groups that
  /// have
  ///   such a shard are gathered; null: from what rests.
  void gather_into(
      const SlotView& slot,
      PlaneId plane,
      PartId part,
      const std::vector<WeightPlanes::Gather>& gathers,
      const SlotView& shards) const;
  /// Fills the slot of UnitSpec::post_forward, on the current stream.
  /// @param slot  that of kComputePlane.
  void save_post_forward(const SlotView& slot, const SlotView& shards) const;
  /// Makes a derived plane, or a part of it, of its gathered source.
  void derive_into(
      const SlotView& slot,
      PlaneId plane,
      PartId part,
      const SlotView& source) const;
  /// The part that has the parameter; kWhole where there are none.
  PartId part_of(const UnitParameter& parameter) const;

  // What layers ask for (nn::WeightSource).

  /// Absent: the parameter points at its values.
  std::optional<float8::Recipe> recipe(const UnitParameter& parameter) const;
  /// The plane of a product with the parameter, which has a recipe.
  PlaneId plane_of(const UnitParameter& parameter, nn::PlaneUse use) const;
  /// The parameter as it is in a slot.
  /// @param slot  that holds `part` of the plane; resident groups use none.
  float8::Plane view(
      const UnitParameter& parameter,
      PlaneId plane,
      PartId part,
      const SlotView& slot) const;
  /// The same as one product reads it.
  nn::Float8Weight operand(
      const UnitParameter& parameter,
      PlaneId plane,
      float8::Plane view) const;

 private:
  /// A part of the unit's planes: a part of one group's.
  struct Part {
    std::size_t group = 0;
    PartId part = kWhole;
  };

  void check_formats(const std::string& unit);
  void find_parts(const std::string& unit);
  void add_plane(PlaneId plane);
  void add_post_forward_plane();
  /// The PostForwardShard of group `g` in the slot of UnitSpec::post_forward.
  at::Tensor post_forward_slot(std::size_t g, const SlotView& shards) const;
  /// Whether group `g` has some of it.
  bool is_in(std::size_t g, PlaneId plane, PartId part) const {
    return groups_[g]->weights().has(plane) &&
           (part == kWhole || parts_[part].group == g);
  }
  /// As its group counts it.
  PartId part_in_group(PartId part) const {
    return part == kWhole ? kWhole : parts_[part].part;
  }
  /// What group `g` has of a plane or of a part of one: in the slot, or where
  /// it rests.
  at::Tensor
  memory(std::size_t g, PlaneId plane, PartId part, const SlotView& slot) const;

  const UnitGroups& groups_;
  /// By plane and group, bytes in the slot.
  std::vector<std::vector<std::int64_t>> offsets_;
  std::vector<Part> parts_;
  UnitSpec planes_;
  bool resident_ = true;
};

}  // namespace flatshard
