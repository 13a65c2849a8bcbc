#pragma once

#include "flatshard/buffer/slot_pool.h"
#include "flatshard/graphs/target_sink.h"
#include "flatshard/schedule/slot_plan.h"
#include "flatshard/unit/slot_view.h"
#include "flatshard/unit/unit.h"

#include <map>
#include <utility>

namespace flatshard {

/// The slots of one unit in the step that runs, at the same places as in the
/// plan of every step.
class UnitSlots {
 public:
  /// @param unit  outlives this.
  UnitSlots(Unit& unit, at::Device device) : unit_(unit), device_(device) {}

  Unit& unit() const { return unit_; }
  void acquired(const SlotKey& key, const Slot& slot);
  /// The unit's parameters point there now.
  void pointed(const SlotView& slot) { pointed_ = slot; }
  /// Returns the present slots, for a region that runs now: where microbatches
  /// interleave, another one may have its own.
  UnitSlots current() const;
  /// Called when another step starts.
  void forget();
  /// Returns whether the next step has a place for the unit's weights, so that
  /// the unit can be pointed at it.
  bool planned() const;

  /// Points the unit's parameters at their places in a forward or in a
  /// backward, until `rest`. For one run, these are the places during that run.
  void point(bool in_backward);
  void rest();
  struct Place {
    PartId part = kWhole;
    SlotView slot;
  };
  /// Returns the memory of an FP8 parameter in a forward or in a backward.
  /// @throws Error{usage} when nothing did.
  Place place(const UnitParameter& p, PlaneId plane, bool in_backward) const;
  /// Returns where the unit's gradients will be; new ones, not written yet.
  TargetSink targets() const;

 private:
  struct InPhases {
    SlotView forward;
    SlotView backward;
  };

  Unit& unit_;
  at::Device device_;
  InPhases weights_;  ///< of the compute plane
  std::map<std::pair<PlaneId, PartId>, InPhases> float8_;
  SlotView gradients_;
  SlotView pointed_;
  bool of_one_run_ = false;
  bool moved_ = false;  ///< a slot had no place in the plan
};

}  // namespace flatshard
