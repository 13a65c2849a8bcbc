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

// The events of a Runtime that others may see: see Runtime::add_observer. All
// functions are called on the host, in launch order and under the runtime's
// lock unless the function's comment states otherwise: an observer must not
// call the runtime. Its exceptions end the forward or backward that runs.

/// Which memory units have, and when.
class SlotObserver {
 public:
  virtual ~SlotObserver() = default;

  /// `unit` owns `slot` from here on, for `key`.
  virtual void
  slot_acquired(const Unit& unit, const SlotKey& key, const Slot& slot) {}
  /// `unit` returns `slot`.
  virtual void slot_released(const Unit& unit, const Slot& slot) {}
  /// Returns whether to call slot_unused, at the cost of waits between streams.
  virtual bool wants_unused_slots() const { return false; }
  /// No work reads or writes `slot` any more, and kernels on the current
  /// stream run before its next use. May be called on the thread of a CPU
  /// stream.
  virtual void slot_unused(const SlotView& slot) {}
  /// The parameters of `unit` point at `slot`; resident ones never do.
  virtual void parameters_pointed(Unit& unit, const SlotView& slot) {}
  /// They point at nothing again.
  virtual void parameters_cleared(Unit& unit) {}
  /// Called when another plan for the slots is in force, made for these
  /// lifetimes.
  virtual void slots_planned(
      const SlotPlan& plan,
      const std::vector<SlotLifetime>& lifetimes) {}
};

/// Where forwards and backwards start and end.
class StepObserver {
 public:
  virtual ~StepObserver() = default;

  /// Called when errors name step `step` from here on.
  virtual void step_named(std::int64_t step) {}
  /// Runtime::finish_step. Called without the lock, so that ranks may wait for
  /// each other.
  virtual void step_ends() {}
  /// The program calls `unit` outside a backward, before any work of the
  /// forward has started. Called without the lock, like step_ends.
  virtual void unit_called(const Unit& unit) {}
  /// The forward of `unit` starts, or a recompute of it.
  virtual void unit_forward_begins(const Unit& unit) {}
  /// An outermost forward of `unit` ended, and the backward of `call` can
  /// follow.
  virtual void expects_backward(const Unit& unit, CallId call) {}
  /// A forward or an unshard by the program is about to start, and none is
  /// open: weights that others wrote are adopted next.
  virtual void forward_begins() {}
  /// The same forward, after they were adopted: another step starts in it if
  /// `weights_changed`.
  /// @param at_rest  no slot is in use and no backward is open.
  virtual void root_forward_begins(bool weights_changed, bool at_rest) {}
  /// An outermost backward starts; gradients of earlier ones may exist.
  virtual void backward_begins() {}
  /// The backward of `call`, a forward of `unit`, starts.
  virtual void backward_began(Unit& unit, CallId call) {}
  /// The outermost backward has ended: compute waits for its reductions.
  virtual void backward_ended() {}
  /// All units are resharded and the step's gradients are gone: something
  /// failed.
  virtual void was_reset() {}
};

/// The gradients of units, before and after their reduction.
class GradientObserver {
 public:
  virtual ~GradientObserver() = default;

  /// The gradient of `parameter` is complete on this rank, and the runtime has
  /// not consumed it yet.
  virtual void gradient_arrived(
      const Unit& unit,
      const UnitParameter& parameter) {}
  /// `slot` contains this rank's full gradient of `unit`. Its reduction is
  /// queued next. Kernels run here go to the current stream, after its kernels.
  virtual void gradients_ready(Unit& unit, const SlotView& slot) {}
  /// Returns whether all gradients must be written to their slots, and none to
  /// the sum of microbatches: gradients_ready reads the slot, or steps that
  /// write there have to be equal to the others.
  virtual bool needs_slots() const { return false; }
  /// Returns whether to call gradients_reduced. The host waits for that on CPUs
  /// and with offloading.
  virtual bool wants_reduced_gradients(const Unit& unit) { return false; }
  /// The groups of `unit` have their reduced gradients, for kernels on the
  /// current stream (on a GPU the reduce stream). The backward may continue
  /// with other units.
  virtual void gradients_reduced(Unit& unit) {}
};

/// The observers of one kind. An empty list costs nothing.
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
  /// Returns whether one of them answers true.
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

/// The observers of one Runtime.
struct RuntimeObservers {
  ObserverList<SlotObserver> slots;
  ObserverList<StepObserver> steps;
  ObserverList<GradientObserver> gradients;

  /// Adds it as each kind that it is.
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
  bool need_gradient_slots() const {
    return gradients.any([](GradientObserver& o) { return o.needs_slots(); });
  }
  bool want_reduced_gradients(const Unit& unit) const {
    return gradients.any(
        [&](GradientObserver& o) { return o.wants_reduced_gradients(unit); });
  }
};

}  // namespace flatshard
