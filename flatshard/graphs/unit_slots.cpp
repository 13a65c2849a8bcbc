#include "flatshard/graphs/unit_slots.h"

#include "flatshard/core/error.h"

namespace flatshard {

void UnitSlots::acquired(const SlotKey& key, const Slot& slot) {
  moved_ |= slot.offset < 0;
  const SlotView view{slot.data, slot.nbytes, device_};
  if (key.role == SlotRole::gradients) {
    gradients_ = view;
    return;
  }
  InPhases& weights =
      key.plane == kComputePlane ? weights_ : float8_[{key.plane, key.part}];
  (key.role == SlotRole::forward_weights ? weights.forward : weights.backward) =
      view;
}

UnitSlots UnitSlots::current() const {
  UnitSlots now = *this;
  now.of_one_run_ = true;
  return now;
}

void UnitSlots::forget() {
  weights_ = {};
  float8_.clear();
  gradients_ = {};
  pointed_ = {};
  moved_ = false;
}

bool UnitSlots::planned() const {
  const SlotView& weights = of_one_run_ ? pointed_ : weights_.forward;
  return !moved_ && (unit_.resident() || weights ||
                     unit_.weights().nbytes(kComputePlane, kWhole) == 0);
}

void UnitSlots::point(bool in_backward) {
  if (of_one_run_) {
    unit_.pointers().point_at(pointed_);
    return;
  }
  const bool own = in_backward && static_cast<bool>(weights_.backward);
  unit_.pointers().point_at(own ? weights_.backward : weights_.forward);
}

UnitSlots::Place UnitSlots::place(
    const UnitParameter& p,
    PlaneId plane,
    bool in_backward) const {
  if (unit_.weights().rests(plane)) {
    return {};
  }
  // The forward's unsharded weights may serve the backward, unless the backward
  // all-gathered a part of them again.
  for (const bool backward : {true, false}) {
    for (const PartId part : {kWhole, unit_.weights().part_of(p)}) {
      const auto found = float8_.find({plane, part});
      if (found == float8_.end() || (backward && !in_backward)) {
        continue;
      }
      const auto& slot =
          backward ? found->second.backward : found->second.forward;
      if (slot) {
        return {part, slot};
      }
    }
  }
  FLATSHARD_THROW(
      usage,
      "parameter {}: its plane {} was not all-gathered in the warmup steps",
      p.name,
      plane);
}

void UnitSlots::rest() {
  unit_.pointers().clear();
  unit_.pointers().hide();
}

TargetSink UnitSlots::targets() const {
  TargetSink targets;
  for (const UnitParameter& p : unit_.parameters()) {
    if (p.tensor.requires_grad() && gradients_) {
      targets.add(p.tensor, {.grad = unit_.gradients().view(gradients_, p)});
    }
  }
  return targets;
}

}  // namespace flatshard
