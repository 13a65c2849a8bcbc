#pragma once

#include "flatshard/float8/matmul.h"
#include "flatshard/nn/weight_source.h"
#include "flatshard/schedule/events.h"
#include "flatshard/unit/slot_view.h"
#include "flatshard/unit/unit_parameter.h"

#include <cstdint>
#include <string>
#include <vector>

namespace flatshard {

/// The gathered weights of a unit: which planes it has, what lies where in
/// their slots, and how a slot is filled.
class UnitWeights {
 public:
  /// The planes that are gathered: the compute weights (WeightPlanes), and in
  /// units with FP8 weights (Float8Planes) what their forwards and their
  /// backwards read.
  static constexpr PlaneId kComputePlane = 0;
  static constexpr PlaneId kRowPlane = 1;
  static constexpr PlaneId kColumnPlane = 2;
  /// UnitSpec::post_forward of units whose groups have a PostForwardShard.
  static constexpr PlaneId kPostForwardPlane = 3;
  static PlaneId plane_of(nn::PlaneUse use) {
    return use == nn::PlaneUse::fprop ? kRowPlane : kColumnPlane;
  }

  /// @param unit    its name, for messages.
  /// @param groups  outlive this.
  UnitWeights(const std::string& unit, const UnitGroups& groups);

  /// What the Scheduler is told of planes, and their slices.
  const UnitSpec& planes() const { return planes_; }
  /// Before the Runtime has the unit.
  void set_gather_parts(GatherParts parts) { planes_.gather_parts = parts; }
  bool has_float8() const { return planes_.planes().contains(kRowPlane); }
  /// Whether `plane` has weights of the group.
  bool is_in_plane(const ParamGroup& group, PlaneId plane) const {
    return (group.weights().float8() != nullptr) == (plane != kComputePlane);
  }
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
    return resident_ && !transient_.contains(plane);
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
  /// @param shards  the slot of kPostForwardPlane, from which groups that have
  ///   such a shard are gathered; null: from what rests.
  void gather_into(
      const SlotView& slot,
      PlaneId plane,
      PartId part,
      const std::vector<WeightPlanes::Gather>& gathers,
      const SlotView& shards) const;
  /// Fills the slot of kPostForwardPlane, on the current stream.
  /// @param slot  that of kComputePlane.
  void save_post_forward(const SlotView& slot, const SlotView& shards) const;
  /// Makes the columns, or a part of them, of gathered rows.
  void derive_into(PartId part, const SlotView& rows, const SlotView& columns)
      const;
  /// The part that has the parameter; kWhole where there are none.
  PartId part_of(const UnitParameter& parameter) const;
  /// A parameter of an FP8 group as one product reads it: kRowPlane, or
  /// kColumnPlane with transposed data.
  /// @param slot  that holds `part` of the plane; resident groups use none.
  float8::Operand float8_operand(
      const UnitParameter& parameter,
      PlaneId plane,
      PartId part,
      const SlotView& slot) const;
  /// The same as it lies in the slot.
  float8::Plane float8_view(
      const UnitParameter& parameter,
      PlaneId plane,
      PartId part,
      const SlotView& slot) const;

 private:
  void add_float8_planes(const std::string& unit);
  void add_post_forward_plane();
  /// The whole compute weights of group `g` in the slot of kComputePlane, and
  /// its PostForwardShard in that of kPostForwardPlane.
  at::Tensor compute_slot(std::size_t g, const SlotView& slot) const;
  at::Tensor post_forward_slot(std::size_t g, const SlotView& shards) const;
  static Float8Planes::Plane float8_plane_of(PlaneId plane) {
    return plane == kRowPlane ? Float8Planes::kRows : Float8Planes::kColumns;
  }
  /// Whether group `g` has some of it.
  bool is_in_part(std::size_t g, PartId part) const {
    return part == kWhole || parts_[part].group == g;
  }
  /// As its group counts it.
  int part_in_group(PartId part) const {
    return part == kWhole ? Float8Planes::kWhole : parts_[part].part;
  }
  /// What group `g` has of the slot for a plane or a part of one.
  at::Tensor float8_slot(
      std::size_t g,
      PlaneId plane,
      PartId part,
      const SlotView& slot) const;

  const UnitGroups& groups_;
  /// Per plane and group, bytes in the slot.
  std::vector<std::vector<std::int64_t>> offsets_;
  /// A part of the FP8 planes: a part of one group's.
  struct Part {
    std::size_t group = 0;
    int part = 0;
  };
  std::vector<Part> parts_;
  UnitSpec planes_;
  PlaneSet transient_;  ///< UnitSpec::transient
  bool resident_ = true;
};

}  // namespace flatshard
