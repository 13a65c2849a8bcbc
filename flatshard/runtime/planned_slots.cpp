#include "flatshard/runtime/planned_slots.h"

#include "flatshard/unit/unit_weights.h"

namespace flatshard {

void PlannedSlots::plan(
    std::span<const UnitSpec> specs,
    std::span<const Action> actions) {
  std::vector<SlotLifetime> lifetimes;
  if (!on_demand_) {
    lifetimes = slot_lifetimes(specs, actions);
  }
  ++num_plans_;
  places_ = SlotPlan::build(lifetimes);
  pool_.set_arena(places_.arena_nbytes());
  planned_dynamic_ = pool_.num_dynamic();
  observers_.slots.tell(
      [&](SlotObserver& o) { o.slots_planned(places_, lifetimes); });
}

bool PlannedSlots::should_replan() const {
  return !on_demand_ && pool_.num_dynamic() > planned_dynamic_ &&
         pool_.num_held() == 0;
}

void PlannedSlots::acquire(
    const Unit& unit,
    const SlotKey& key,
    std::int64_t nbytes,
    const std::shared_ptr<Stream>& filler,
    Slot& slot) {
  slot = pool_.acquire(places_.offset(key), nbytes, filler);
  if (key.role == SlotRole::gradients || key.plane == kComputePlane) {
    last_[key.unit][static_cast<std::size_t>(key.role)] = view(slot);
  }
  observers_.slots.tell(
      [&](SlotObserver& o) { o.slot_acquired(unit, key, slot); });
}

}  // namespace flatshard
