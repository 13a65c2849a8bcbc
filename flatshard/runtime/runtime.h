#pragma once

#include "flatshard/nn/hooks.h"
#include "flatshard/nn/weight_source.h"
#include "flatshard/nn/wgrad.h"
#include "flatshard/runtime/gather_control.h"
#include "flatshard/runtime/runtime_core.h"
#include "flatshard/runtime/unit_calls.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {

class ModelGraphs;

/// A sharded model while it trains: the lock around a RuntimeCore, which
/// carries out what forwards, backwards and steps need, and what training loops
/// and layers ask of it. What only some callers need has a class of its own:
/// `gathers()`, `calls()`, `graphs()`.
///
/// Made by `fully_shard`. Call it from one thread at a time; autograd may call
/// it from its own. A destroyed Runtime leaves hooks that do nothing.
class Runtime : public nn::WgradSink,
                public nn::RecomputeListener,
                public nn::WeightSource {
 public:
  /// Units in order of registration, parents before children; `parents` has one
  /// entry per unit. Collective where options.copy_engines asks for any.
  static std::shared_ptr<Runtime> create(
      std::shared_ptr<Mesh> mesh,
      std::vector<std::unique_ptr<Unit>> units,
      const std::vector<UnitId>& parents,
      const RuntimeOptions& options);
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
  /// Forward hooks that this has on a module.
  std::size_t num_hooks_on(const nn::Module& module) const;
  /// What is gathered, how long it stays, and gathers on request.
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
  /// Call after the optimizer's step: observers hear of it. With
  /// DebugOptions::strict it is collective and blocks the host.
  void finish_step();

  /// For whoever calls modules itself.
  UnitCalls& calls() { return calls_; }
  /// The CUDA graphs of its regions and steps; see graphs/model_graphs.h, whose
  /// `add_graphs` fully_shard calls.
  ModelGraphs& graphs() const { return *graphs_; }
  void set_graphs(std::shared_ptr<ModelGraphs> graphs) {
    graphs_ = std::move(graphs);
  }
  /// For those who run a step in another way.
  RuntimeCore& core() { return core_; }
  const RuntimeCore& core() const { return core_; }

  // For reports and tests ----------------------------------------------------

  const std::vector<std::unique_ptr<Unit>>& units() const {
    return core_.units;
  }
  const std::shared_ptr<Mesh>& mesh() const { return core_.mesh; }
  const Scheduler& scheduler() const { return core_.step.scheduler; }
  /// Slots, their plan and their addresses.
  const Executor& executor() const { return core_.executor; }
  /// How long compute waits for gathers and reductions.
  ExposedWaits& exposed_waits() { return core_.executor.streams().exposed(); }
  RuntimeTrace trace() const;
  void clear_trace();
  /// The step that error messages name: Executor::step.
  void set_step(std::int64_t step);
  /// Shown from now on what it wants to see, as a SlotObserver, a StepObserver,
  /// a GradientObserver or several of these (observer.h). Without observers
  /// nothing is spent on them.
  template <class Observer>
  void add_observer(const std::shared_ptr<Observer>& observer) {
    const std::lock_guard lock(core_.mutex);
    core_.observers.add(observer);
  }

 private:
  Runtime(
      std::shared_ptr<Mesh> mesh,
      std::vector<std::unique_ptr<Unit>> units,
      const std::vector<UnitId>& parents,
      const RuntimeOptions& options);

  // Hooks on modules of nn::Module; runtime_modules.cpp.
  static void hook_modules(const std::shared_ptr<Runtime>& runtime);

  // What layers ask for; runtime_layers.cpp. Each takes the lock.
  std::optional<nn::WgradTarget> begin_wgrad(
      const at::Tensor& parameter) override;
  void end_wgrad(const at::Tensor& parameter) override;
  bool defers(const at::Tensor& parameter) override;
  void defer(const at::Tensor& parameter, nn::LateWgrad write) override;
  void recompute_begin(nn::Module& owner) override;
  std::optional<float8::Recipe> recipe(
      const at::Tensor& parameter) const override;
  std::optional<nn::Float8Weight> plane(
      const at::Tensor& parameter,
      nn::PlaneUse use) override;

  RuntimeCore core_;
  struct ModuleHook {
    const nn::Module* module = nullptr;
    nn::HookHandle handle;
  };
  std::vector<ModuleHook> module_hooks_;
  GatherControl gathers_{core_};
  UnitCalls calls_{core_};
  std::shared_ptr<ModelGraphs> graphs_;
};

}  // namespace flatshard
