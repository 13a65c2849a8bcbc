#pragma once

#include "flatshard/nn/hooks.h"
#include "flatshard/nn/visit.h"
#include "flatshard/nn/weight_source.h"
#include "flatshard/nn/wgrad.h"
#include "flatshard/schedule/scheduler.h"
#include "flatshard/unit/autograd_events.h"
#include "flatshard/unit/executor.h"
#include "flatshard/unit/gather_control.h"
#include "flatshard/unit/model_graphs.h"
#include "flatshard/unit/observer.h"
#include "flatshard/unit/plane_places.h"
#include "flatshard/unit/runtime_options.h"
#include "flatshard/unit/strict_checks.h"
#include "flatshard/unit/unit.h"
#include "flatshard/unit/unit_calls.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

class BackwardPass;

/// Events that came and actions that were really carried out, in order.
struct RuntimeTrace {
  std::vector<ScheduleEvent> events;
  std::vector<Action> actions;
};

/// The door to three: what AutogradEvents sees of a training program (forward,
/// backward, step) goes to the Scheduler, and an Executor carries out what that
/// answers. Here are the lock, who may read parameters when, and what happens
/// after a failure. What only some callers need has a class of its own:
/// `gathers()`, `calls()`, `graphs()`.
///
/// Made by `fully_shard`. Call it from one thread at a time; autograd may call
/// it from its own. A destroyed Runtime leaves hooks that do nothing.
class Runtime : public nn::WgradSink,
                public nn::RecomputeListener,
                public nn::WeightSource,
                public PlaneReader,
                public AutogradListener,
                public std::enable_shared_from_this<Runtime> {
 public:
  /// Units in order of registration, parents before children; `parents` has one
  /// entry per unit. Collective where options.copy_engines asks for any.
  static std::shared_ptr<Runtime> create(
      std::shared_ptr<Mesh> mesh,
      std::vector<std::unique_ptr<Unit>> units,
      std::vector<UnitId> parents,
      RuntimeOptions options);
  ~Runtime() override;

  // For training loops -------------------------------------------------------

  /// Says of the backwards that follow whether they are the step's last.
  /// Strategies that accumulate before they communicate (ZeRO-0/1, the outer
  /// axes of HSDP and HFSDP) reduce on the last one only. Default: true.
  void set_is_last_microbatch(bool is_last);
  /// false (no_sync): gradients accumulate unsharded without any collective.
  void set_sync_gradients(bool sync);
  /// How many gradient slots may live at once: one is filled while the others
  /// are reduced. Between two steps, equal on all ranks, and only with
  /// RuntimeOptions::slots_on_demand: an arena has room for the two of its
  /// plan.
  void set_max_grad_slots(int max_grad_slots);

  /// The unit that a module is: the root, or one of FullyShardOptions::units or
  /// unit_choices. @throws Error{usage} naming the module when it is none.
  UnitId unit_of(const nn::Module& module) const;
  /// What is gathered, how long it stays, and gathers by hand.
  GatherControl& gathers() { return gathers_; }

  /// All trainable groups, in order of units: what an optimizer takes. The
  /// Runtime owns them.
  std::vector<ParamGroup*> groups() const;
  /// The same and the frozen ones, in order of units: what checkpoints, exports
  /// and whoever reads or writes weights take.
  std::vector<ParamGroup*> all_groups() const;
  void zero_grad();
  /// Ends every open forward and backward after an exception, releases all
  /// weights, drops the gradients of the step and forgets errors of the
  /// streams. Collective order is safe again when all ranks call it. The next
  /// root forward after a failed backward or a failed collective does it by
  /// itself. Blocks until the work of the communication streams is over.
  void reset();
  /// Blocks until all queued work of this runtime's streams is done.
  void synchronize();
  /// Call after the optimizer's step. With DebugOptions::strict it checks that
  /// the step's life cycles are complete and the same on all ranks; collective
  /// then, and blocks the host. Otherwise it does nothing.
  void finish_step();

  /// For whoever calls modules itself.
  UnitCalls& calls() { return calls_; }
  /// The CUDA graphs of its regions and steps, if it has any.
  ModelGraphs& graphs() { return graphs_; }
  const ModelGraphs& graphs() const { return graphs_; }

  // For reports and tests ----------------------------------------------------

  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  const std::shared_ptr<Mesh>& mesh() const { return mesh_; }
  const Scheduler& scheduler() const { return scheduler_; }
  /// Slots, their plan and their addresses.
  const Executor& executor() const { return executor_; }
  /// How long compute waits for gathers and reductions.
  ExposedWaits& exposed_waits() { return executor_.streams().exposed(); }
  RuntimeTrace trace() const;
  void clear_trace();
  /// The step that error messages name: Executor::step.
  void set_step(std::int64_t step);
  /// Shown from now on what happens with memory. Without any observer nothing
  /// is spent on it.
  void add_observer(std::shared_ptr<RuntimeObserver> observer);

 private:
  // Its roles and those who run a step in another way.
  friend class BackwardPass;
  friend class GatherControl;
  friend class ModelGraphs;
  friend class StepGraph;
  friend class UnitCalls;
  friend struct StepStamp;
  Runtime(
      std::shared_ptr<Mesh> mesh,
      std::vector<std::unique_ptr<Unit>> units,
      std::vector<UnitId> parents,
      RuntimeOptions options);

  // As nn::WeightSource; runtime_float8.cpp. `plane` takes the lock.
  std::optional<float8::Recipe> recipe(
      const at::Tensor& parameter) const override;
  std::optional<nn::Float8Weight> plane(
      const at::Tensor& parameter,
      nn::PlaneUse use) override;
  const void* await_plane(const at::Tensor& parameter, nn::PlaneUse use)
      override;
  /// With the lock.
  const UnitParameter& ask_for_plane(ParameterRef ref, PlaneId plane);

  // As nn::WgradSink and nn::RecomputeListener. Each takes the lock.
  std::optional<nn::WgradTarget> begin_wgrad(
      const at::Tensor& parameter) override;
  void end_wgrad(const at::Tensor& parameter) override;
  bool defers(const at::Tensor& parameter) override;
  void defer(const at::Tensor& parameter, nn::LateWgrad write) override;
  void recompute_begin(nn::Module& owner) override;
  void recompute_end(nn::Module& owner) override;

  // As AutogradListener. The first three take the lock, the others have it.
  void on_tensor_grad(const WatchedTensor& tensor) override;
  void on_parameter_done(ParameterRef parameter) override;
  void on_task_end(TaskId task) override;
  void feed(const ScheduleEvent& event) override;
  void forward_begins(UnitId unit, bool outermost) override;
  void task_begins() override;
  void backward_begins(UnitId unit, CallId call) override;

  // Hooks on modules of nn::Module; runtime_modules.cpp.
  void hook_modules();
  /// DebugOptions::strict.
  void watch_modules();
  void on_module_called(UnitId unit, const std::string& name);

  // With the lock held.
  bool rests() const { return !events_.is_open() && !events_.in_task(); }
  void before_root_forward();
  /// The weights are of another `generation` than in the last step.
  void begin_step(std::int64_t generation);
  void adopt_foreign_writes();
  void reset_locked();
  void reset_after_failure();
  bool failed() const;
  std::vector<Action> decide(const ScheduleEvent& event);
  void record(const Action& action);
  void plan_next_step();

  // Who may read parameters: UnitPointers::hide.
  void reveal(Unit& unit);
  void hide(Unit& unit);
  void hide_all();

  // DebugOptions::strict; takes the lock itself, if any.
  void say_next(UnitId next);

  std::shared_ptr<Mesh> mesh_;
  RuntimeOptions options_;
  std::vector<std::unique_ptr<Unit>> units_;
  Scheduler scheduler_;
  RuntimeObservers observers_;
  Executor executor_;
  AutogradEvents events_;
  std::vector<nn::HookHandle> module_hooks_;

  /// Per unit: somebody asked for its weights, so they are not hidden.
  std::vector<bool> by_hand_;
  /// A backward with create_graph left a graph that reads the weights.
  bool graph_reads_weights_ = false;
  std::int64_t seen_generation_ = -1;
  /// What an action threw; from then to the reset no event has an effect.
  std::string failure_;
  BackwardPass* open_pass_ = nullptr;  ///< whose backward is open
  bool is_last_microbatch_ = true;
  bool sync_gradients_ = true;
  std::vector<Action> step_actions_;  ///< since the weights last changed
  RuntimeTrace trace_;
  /// Changes of what a graph of a step was recorded with.
  std::int64_t num_rule_changes_ = 0;
  std::unique_ptr<StrictChecks> strict_;  ///< null unless asked for
  GatherControl gathers_{*this};
  UnitCalls calls_{*this};
  ModelGraphs graphs_{*this};
  mutable std::mutex mutex_;
};

}  // namespace flatshard
