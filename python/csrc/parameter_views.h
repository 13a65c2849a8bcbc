#pragma once

#include "flatshard/runtime/observer.h"
#include "python/csrc/bind.h"
#include "python/csrc/grad_views.h"

#include <memory>
#include <vector>

namespace flatshard::python {

/// Which of its two faces a parameter shows in its modules: the unsharded one
/// while its unit computes, the shard (a DTensor) otherwise, with its gradient
/// after a backward.
///
/// Belongs to the runtime as an observer. The runtime calls it while it has its
/// lock, and mostly without the GIL. It never calls the runtime.
class ParameterViews : public StepObserver,
                       public GradientObserver,
                       public SlotObserver {
 public:
  /// One place of a parameter in a module.
  struct Place {
    py::object parameters;  ///< the module's dict `_parameters`
    py::object name;
    py::object whole;
    py::object shard;
    /// None, or the maker of another tensor of unsharded memory. Modules see
    /// its attribute `tensor` instead of `whole`. Has `point` and `clear`, see
    /// SlotObserver, and `renew`, called when a forward starts to show it.
    py::object shown;

    py::object face(bool whole_one) const;
  };

  /// The views of each unit. The unit's module owns the gradients' views, and
  /// these own the runtime.
  struct UnitViews {
    std::vector<Place> places;
    std::weak_ptr<GradViews> grads;
  };

  /// @param before_forward, before_backward  called without arguments, before
  ///   an outermost one.
  /// @param whole_written  see tell_whole_writes.
  ParameterViews(
      std::vector<UnitViews> units,
      py::object before_forward,
      py::object before_backward,
      py::object whole_written);
  ~ParameterViews() override;

  // Around a forward of `unit`, with the GIL.
  void unit_begins(UnitId unit);
  enum class After {
    sharded,      ///< the shards show
    more_follow,  ///< the whole ones show until the outermost forward ends
    may_be_kept,  ///< see set_keeps
  };
  void unit_ended(UnitId unit, After after = After::sharded);
  /// Called before the unsharded parameters of `unit` are freed, with the GIL
  /// and without the runtime's lock: calls whole_written(unit, wholes) with
  /// the parameters that were written since they show.
  void tell_whole_writes(UnitId unit);
  /// A step starts: shows the shards of units whose unsharded parameters show
  /// since a forward, and copies writes to those to the shards.
  void end_all_kept();
  /// Outside any forward: after unshard and reshard.
  void show(UnitId unit, bool whole);
  /// Returns whether a forward is open.
  bool in_forward() const;
  /// Whether the unsharded parameters of `unit` show after a forward, as long
  /// as they have memory: until its backward, a reshard or the next step.
  void set_keeps(UnitId unit, bool keeps) { units_.at(unit).keeps = keeps; }
  /// The unsharded parameters of `unit` always have memory.
  void set_resident(UnitId unit) { units_.at(unit).is_resident = true; }
  /// A capture calls the unit's modules, or did: the unsharded parameters show.
  /// Called with the GIL, while no forward and no backward is open.
  void capture(UnitId unit, bool captures);
  bool captures() const { return captures_; }
  bool runs_hooks() const { return runs_hooks_; }
  /// The open backward continues in another one, and its reductions are not
  /// joined: gradients show after that. Called with the GIL.
  void backward_goes_on() { goes_on_ = true; }
  /// @throws Error{usage} for hooks that would see gradients before.
  void check_may_go_on() const;
  /// Returns whether somebody put another tensor into a place. Called with the
  /// GIL.
  bool shows_others() const;
  /// Returns whether a parameter was frozen or unfrozen, and the unsharded one
  /// does not follow yet.
  bool trains_others() const;

  // The functions of StepObserver, GradientObserver and SlotObserver.
  void forward_begins() override;
  void backward_begins() override;
  void backward_began(Unit& unit, CallId call) override;
  void backward_ended() override;
  void was_reset() override;
  bool wants_reduced_gradients(const Unit& unit) override;
  void gradients_reduced(Unit& unit) override;
  void gradients_ready(Unit& unit, const SlotView& slot) override;
  void parameters_pointed(Unit& unit, const SlotView& slot) override;
  void parameters_cleared(Unit& unit) override;

  /// @throws Error{usage} inside a hook that these views call, or inside a
  ///   capture. They must not call the runtime, because it waits for them.
  void check_no_hook() const;

 private:
  struct State {
    bool shows_others() const;

    UnitViews views;
    int open_forwards = 0;
    bool in_backward = false;
    bool waits = false;  ///< for other modules of the unit
    bool shows_whole = false;
    bool points = false;  ///< the whole ones have memory of a slot
    bool is_resident = false;
    bool keeps = false;
    bool is_kept = false;  ///< they show since a forward
    /// requires_grad of the unsharded ones, when they started to be kept.
    std::vector<bool> trained;
    /// The unsharded tensors of the places, and their versions when they
    /// started to show.
    std::vector<at::Tensor> wholes;
    std::vector<std::uint32_t> versions;
    /// A hook may have dropped the gradients of the backward that runs.
    bool ran_hooks = false;
    std::vector<at::Tensor> shards;  ///< looked at without the GIL
    std::vector<py::object> shown;   ///< of the places, each once
  };
  void set(State& state, bool whole);
  /// Copies changes of requires_grad to the shards.
  void end_kept(State& state);
  void call_shown(Unit& unit, const char* function);
  void end_waits();
  /// Calls what(GradViews&) for each unit whose module still exists.
  template <class F>
  void for_all_grads(F&& what);

  std::vector<State> units_;
  py::object before_forward_;
  py::object before_backward_;
  py::object whole_written_;
  bool runs_hooks_ = false;
  bool captures_ = false;
  bool goes_on_ = false;  ///< the backward that runs
  bool went_on_ = false;  ///< the last one
};

}  // namespace flatshard::python
