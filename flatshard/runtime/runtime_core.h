#pragma once

#include "flatshard/autograd/autograd_events.h"
#include "flatshard/runtime/executor.h"
#include "flatshard/runtime/observer.h"
#include "flatshard/runtime/open_backward.h"
#include "flatshard/runtime/runtime_options.h"
#include "flatshard/runtime/step_state.h"
#include "flatshard/runtime/stored_activations.h"
#include "flatshard/unit/unit.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace flatshard {

/// The events received and the actions actually carried out, in order.
struct RuntimeTrace {
  std::vector<ScheduleEvent> events;
  std::vector<Action> actions;
};

/// The parts of a Runtime: AutogradEvents observes a training program (forward,
/// backward, step) and feeds the Scheduler, and an Executor carries out the
/// actions. Users are Runtime, its roles, and callers that run a step in
/// another way: StepGraph and BackwardPass.
///
/// A caller that calls or reads anything of it that may change locks `mutex`.
/// The three functions that hooks of autograd call lock it themselves.
struct RuntimeCore : public AutogradListener {
  using Units = std::vector<std::unique_ptr<Unit>>;

  RuntimeCore(
      std::shared_ptr<Mesh> mesh,
      Units units,
      const std::vector<UnitId>& parents,
      const RuntimeOptions& options);

  const std::shared_ptr<Mesh> mesh;
  const RuntimeOptions options;
  const Units units;
  StepState step;
  RuntimeObservers observers;
  Executor executor;
  AutogradEvents events;
  OpenBackward* open_backward = nullptr;
  /// Parts that recompute, and whose graphs ended without a backward.
  std::shared_ptr<AbandonedParts> abandoned;
  RuntimeTrace trace;
  /// Changes of what a graph of a step was recorded with.
  std::int64_t num_rule_changes = 0;
  mutable std::mutex mutex;

  /// Returns the groups of all units, in their order.
  std::vector<ParamGroup*> all_groups() const;
  std::vector<ParamGroup*> trainable_groups() const;

  // A step -------------------------------------------------------------------

  /// Neither a forward nor a backward is open.
  bool rests() const { return !events.is_open() && !events.in_task(); }
  void before_root_forward();
  void set_microbatch(bool is_last, bool sync);
  /// The next step's slots are planned as if its units ran once each, in their
  /// order.
  void plan_next_step();
  /// Adopts writes to weights that were not announced.
  void adopt_foreign_writes();
  /// Waits for a plane of a parameter that has no values: the part that has it
  /// is all-gathered, and compute waits for it.
  /// @return  the parameter in it; valid until that is resharded.
  /// @throws Error{usage} outside the unit's forward and backward.
  PlaneView await_plane(ParameterRef ref, PlaneId plane);
  /// One part of a call no longer reads what the call keeps.
  void kept_done(UnitId unit, CallId call);
  /// Returns UnitGradients::sum_target for the backward that runs.
  std::optional<nn::WgradTarget> sum_target(ParameterRef parameter);
  /// An action was carried out.
  void record(const Action& action);

  // Access to parameters: UnitPointers::hide ----------------------------------

  void show(UnitId unit);
  void hide(UnitId unit);
  void hide_all();

  // After a failure ----------------------------------------------------------

  bool failed() const { return step.failed() || events.has_dead_task(); }
  void reset();

  // AutogradListener ---------------------------------------------------------

  void on_tensor_grad(const WatchedTensor& tensor) override;
  void on_parameter_done(ParameterRef parameter) override;
  void on_task_end(TaskId task) override;
  void feed(const ScheduleEvent& event) override;
  void forward_begins(UnitId unit, bool outermost) override;
  void task_begins() override;
  void backward_begins(UnitId unit, CallId call) override;

 private:
  /// The weights are of another `generation` than in the last step.
  void begin_step(std::int64_t generation);
  void release_abandoned();
  void reset_after_failure();
  std::vector<Action> decide(const ScheduleEvent& event);
};

}  // namespace flatshard
