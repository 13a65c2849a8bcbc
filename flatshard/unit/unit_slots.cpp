#include "flatshard/unit/unit_slots.h"

namespace flatshard {

void UnitSlots::acquired(const SlotKey& key, const Slot& slot) {
  moved_ |= slot.offset < 0;
  const SlotView view{slot.data, slot.nbytes, device_};
  switch (key.role) {
    case SlotRole::forward_weights:
      forward_ = view;
      break;
    case SlotRole::backward_weights:
      backward_ = view;
      break;
    case SlotRole::gradients:
      gradients_ = view;
      break;
  }
}

void UnitSlots::forget() {
  forward_ = backward_ = gradients_ = {};
  moved_ = false;
}

bool UnitSlots::planned() const {
  return !moved_ && (unit_.resident() || forward_);
}

void UnitSlots::point(bool in_backward) {
  const bool own = in_backward && static_cast<bool>(backward_);
  unit_.point_at(own ? backward_ : forward_);
}

void UnitSlots::rest() {
  unit_.clear();
  unit_.hide();
}

TargetSink UnitSlots::targets() const {
  TargetSink targets;
  for (const UnitParameter& p : unit_.parameters()) {
    if (p.tensor.requires_grad() && gradients_) {
      targets.add(p.tensor, {.grad = unit_.grad_view(gradients_, p)});
    }
  }
  return targets;
}

}  // namespace flatshard
