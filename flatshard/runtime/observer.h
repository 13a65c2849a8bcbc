#pragma once

#include "flatshard/buffer/slot_pool.h"
#include "flatshard/schedule/slot_plan.h"
#include "flatshard/unit/unit.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace flatshard {

/// Sees what a Runtime does; see Runtime::add_observer. Called on
/// the host, in launch order and with the runtime's lock held: an observer must
/// not call the runtime. What it throws ends the forward or backward that runs.
class RuntimeObserver {
 public:
  virtual ~RuntimeObserver() = default;

  /// `unit` holds `slot` from here on, for `key`.
  virtual void
  slot_acquired(const Unit& unit, const SlotKey& key, const Slot& slot) {}
  /// `unit` gives `slot` back.
  virtual void slot_released(const Unit& unit, const Slot& slot) {}
  /// The parameters of `unit` point at `slot`; resident ones never do.
  virtual void parameters_pointed(Unit& unit, const SlotView& slot) {}
  /// A forward or a gather by hand is to begin, and none is open: weights that
  /// others wrote are taken next.
  virtual void forward_begins() {}
  /// The same forward, once they were taken: another step begins in it if
  /// `weights_changed`.
  /// @param at_rest  no slot is held and no backward is open.
  virtual void root_forward_begins(bool weights_changed, bool at_rest) {}
  /// An outermost backward begins; gradients of earlier ones may be there.
  virtual void backward_begins() {}
  /// The backward of a forward of `unit` begins.
  virtual void backward_began(Unit& unit) {}
  /// The outermost backward is over: compute waits for its reductions.
  virtual void backward_ended() {}
  /// All units rest and the step's gradients are gone: something failed.
  virtual void was_reset() {}
  /// `slot` holds this rank's whole gradient of `unit`; its reduction is queued
  /// next. Kernels run here go to the current stream, after the gradient's.
  virtual void gradients_ready(Unit& unit, const SlotView& slot) {}
  /// Whether to call gradients_reduced, for which the host waits on CPUs and
  /// with offloading.
  virtual bool wants_reduced_gradients(const Unit& unit) { return false; }
  /// The groups of `unit` have their reduced gradients, for kernels that go to
  /// the current stream, which is that of the reductions on a GPU. In a
  /// backward that goes on; the unit's own is over.
  virtual void gradients_reduced(Unit& unit) {}
  /// Another plan for the slots is in force, made for these lifetimes.
  virtual void slots_planned(
      const SlotPlan& plan,
      const std::vector<SlotLifetime>& lifetimes) {}
};

/// Those of one Runtime. Without any nothing is spent on them.
class RuntimeObservers {
 public:
  void add(std::shared_ptr<RuntimeObserver> observer) {
    list_.push_back(std::move(observer));
  }
  template <class F>
  void tell(F&& what) const {
    for (const auto& observer : list_) {
      what(*observer);
    }
  }
  bool empty() const { return list_.empty(); }
  bool want_reduced_gradients(const Unit& unit) const {
    return std::any_of(list_.begin(), list_.end(), [&](const auto& observer) {
      return observer->wants_reduced_gradients(unit);
    });
  }

 private:
  std::vector<std::shared_ptr<RuntimeObserver>> list_;
};

}  // namespace flatshard
