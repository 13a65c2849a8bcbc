#pragma once

#include "flatshard/buffer/slot_pool.h"
#include "flatshard/runtime/observer.h"
#include "flatshard/schedule/actions.h"
#include "flatshard/schedule/slot_plan.h"
#include "flatshard/unit/slot_view.h"

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace flatshard {

/// The places of the units' weights and gradients while they have some: each
/// use has its planned place in one arena. Observers are notified of plans and
/// of uses that start.
class PlannedSlots {
 public:
  /// @param observers  outlive this.
  /// @param on_demand  no arena: each use allocates separate memory.
  PlannedSlots(
      at::Device device,
      std::size_t num_units,
      const RuntimeObservers& observers,
      bool on_demand)
      : device_(device),
        observers_(observers),
        on_demand_(on_demand),
        pool_(device),
        last_(num_units) {}

  /// Gives each use its place, as `actions` need them. While no slot is in use.
  void plan(std::span<const UnitSpec> specs, std::span<const Action> actions);
  /// Returns whether a step needed slots that the plan does not have, and no
  /// slot is in use now.
  bool should_replan() const;
  /// Returns the number of calls of `plan` so far.
  std::int64_t num_plans() const { return num_plans_; }

  /// @param slot    gets the memory.
  /// @param filler  as SlotPool::acquire.
  void acquire(
      const Unit& unit,
      const SlotKey& key,
      std::int64_t nbytes,
      const std::shared_ptr<Stream>& filler,
      Slot& slot);
  /// Works as SlotPool::release.
  void
  release(Slot& slot, Event last_use, const std::shared_ptr<Stream>& filler) {
    pool_.release(slot, std::move(last_use), filler);
  }
  void forget_uses() { pool_.forget_uses(); }

  SlotView view(const Slot& slot) const {
    return {slot.data, slot.nbytes, device_};
  }
  /// Returns the unit's slot of `role`, or the last one when it has none:
  /// gradients, or weights of the compute plane. data is null when it never
  /// had. An arena has it at the same place in every step that repeats the one
  /// before.
  SlotView last(UnitId unit, SlotRole role) const {
    return last_[unit][static_cast<std::size_t>(role)];
  }
  const SlotPool& pool() const { return pool_; }
  const SlotPlan& places() const { return places_; }

 private:
  at::Device device_;
  const RuntimeObservers& observers_;
  bool on_demand_;
  SlotPool pool_;
  SlotPlan places_;
  std::vector<std::array<SlotView, 3>> last_;  ///< by unit, by SlotRole
  std::int64_t planned_dynamic_ = 0;  ///< dynamic slots when the plan was made
  std::int64_t num_plans_ = 0;
};

}  // namespace flatshard
