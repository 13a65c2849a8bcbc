#pragma once

#include "flatshard/buffer/slot_pool.h"
#include "flatshard/schedule/events.h"
#include "flatshard/schedule/slot_plan.h"
#include "flatshard/unit/slot_view.h"
#include "flatshard/unit/unit.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace flatshard {

// What others may see of a Runtime: see Runtime::add_observer. All functions
// are called on the host, in launch order and with the runtime's lock held
// unless the function's comment says otherwise: an observer must not call the
// runtime. What it throws ends the forward or backward that runs.

/// Which memory units have, and when.
class SlotObserver {
 public:
  virtual ~SlotObserver() = default;

  /// `unit` holds `slot` from here on, for `key`.
  virtual void
  slot_acquired(const Unit& unit, const SlotKey& key, const Slot& slot) {}
  /// `unit` gives `slot` back.
  virtual void slot_released(const Unit& unit, const Slot& slot) {}
  /// Whether to call slot_unused, which costs waits between streams.
  virtual bool wants_unused_slots() const { return false; }
  /// Nothing reads or writes `slot` any more, and kernels that go to the
  /// current stream come before its next use. May be called on the thread of a
  /// CPU stream.
  virtual void slot_unused(const SlotView& slot) {}
  /// The parameters of `unit` point at `slot`; resident ones never do.
  virtual void parameters_pointed(Unit& unit, const SlotView& slot) {}
  /// They point at nothing again.
  virtual void parameters_cleared(Unit& unit) {}
  /// Another plan for the slots is in force, made for these lifetimes.
  virtual void slots_planned(
      const SlotPlan& plan,
      const std::vector<SlotLifetime>& lifetimes) {}
};

/// Where forwards and backwards begin and end.
class StepObserver {
 public:
  virtual ~StepObserver() = default;

  /// Errors name step `step` from here on.
  virtual void step_named(std::int64_t step) {}
  /// Runtime::finish_step. Without the lock, so that ranks may wait for each
  /// other.
  virtual void step_ends() {}
  /// The program calls `unit` outside of a backward, and nothing of the forward
  /// has begun. Without the lock, like step_ends.
  virtual void unit_called(const Unit& unit) {}
  /// The forward of `unit` begins, or a recompute of it.
  virtual void unit_forward_begins(const Unit& unit) {}
  /// An outermost forward of `unit` ended, and the backward of `call` can
  /// follow.
  virtual void expects_backward(const Unit& unit, CallId call) {}
  /// A forward or an unshard of the program's is to begin, and none is open:
  /// weights that others wrote are taken next.
  virtual void forward_begins() {}
  /// The same forward, once they were taken: another step begins in it if
  /// `weights_changed`.
  /// @param at_rest  no slot is held and no backward is open.
  virtual void root_forward_begins(bool weights_changed, bool at_rest) {}
  /// An outermost backward begins; gradients of earlier ones may be there.
  virtual void backward_begins() {}
  /// The backward of `call`, a forward of `unit`, begins.
  virtual void backward_began(Unit& unit, CallId call) {}
  /// The outermost backward is over: compute waits for its reductions.
  virtual void backward_ended() {}
  /// All units rest and the step's gradients are gone: something failed.
  virtual void was_reset() {}
};

/// The gradients of units, before and after their reduction.
class GradientObserver {
 public:
  virtual ~GradientObserver() = default;

  /// The gradient of `parameter` is complete on this rank, and the runtime has
  /// not taken it yet.
  virtual void gradient_arrived(
      const Unit& unit,
      const UnitParameter& parameter) {}
  /// `slot` holds this rank's whole gradient of `unit`; its reduction is queued
  /// next. Kernels run here go to the current stream, after the gradient's.
  virtual void gradients_ready(Unit& unit, const SlotView& slot) {}
  /// Whether to call gradients_reduced, for which the host waits on CPUs and
  /// with offloading.
  virtual bool wants_reduced_gradients(const Unit& unit) { return false; }
  /// The groups of `unit` have their reduced gradients, for kernels that go to
  /// the current stream, which is that of the reductions on a GPU. In a
  /// backward that continues; the unit's own is over.
  virtual void gradients_reduced(Unit& unit) {}
};

/// Those of one kind. Without any nothing is spent on them.
template <class Observer>
class ObserverList {
 public:
  void add(std::shared_ptr<Observer> observer) {
    list_.push_back(std::move(observer));
  }
  template <class F>
  void tell(F&& what) const {
    for (const auto& observer : list_) {
      what(*observer);
    }
  }
  /// Whether one of them answers true.
  template <class F>
  bool any(F&& asks) const {
    return std::ranges::any_of(list_, [&](const auto& observer) {
      return asks(*observer);
    });
  }
  bool empty() const { return list_.empty(); }

 private:
  std::vector<std::shared_ptr<Observer>> list_;
};

/// Those of one Runtime.
struct RuntimeObservers {
  ObserverList<SlotObserver> slots;
  ObserverList<StepObserver> steps;
  ObserverList<GradientObserver> gradients;

  /// As each kind that it is.
  template <class Observer>
  void add(const std::shared_ptr<Observer>& observer) {
    static_assert(
        std::is_base_of_v<SlotObserver, Observer> ||
        std::is_base_of_v<StepObserver, Observer> ||
        std::is_base_of_v<GradientObserver, Observer>);
    if constexpr (std::is_base_of_v<SlotObserver, Observer>) {
      slots.add(observer);
    }
    if constexpr (std::is_base_of_v<StepObserver, Observer>) {
      steps.add(observer);
    }
    if constexpr (std::is_base_of_v<GradientObserver, Observer>) {
      gradients.add(observer);
    }
  }
  bool empty() const {
    return slots.empty() && steps.empty() && gradients.empty();
  }
  bool want_unused_slots() const {
    return slots.any([](SlotObserver& o) { return o.wants_unused_slots(); });
  }
  bool want_reduced_gradients(const Unit& unit) const {
    return gradients.any(
        [&](GradientObserver& o) { return o.wants_reduced_gradients(unit); });
  }
};

}  // namespace flatshard
