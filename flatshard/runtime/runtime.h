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

/// A sharded model while it trains: the lock around a RuntimeCore that carries
/// out forwards, backwards and steps, and the functions for training loops and
/// layers. Functions for few callers are in separate classes: `gathers()`,
/// `calls()`, `graphs()`.
///
/// Made by `fully_shard`. Call it from one thread at a time; autograd may call
/// it from its own. A destroyed Runtime leaves hooks that do nothing.
class Runtime : public nn::WgradSink,
                public nn::RecomputeListener,
                public nn::WeightSource {
 public:
  /// Units in order of registration, parents before children; `parents` has one
  /// entry per unit. Collective if options.copy_engines requests any.
  static std::shared_ptr<Runtime> create(
      std::shared_ptr<Mesh> mesh,
      std::vector<std::unique_ptr<Unit>> units,
      const std::vector<UnitId>& parents,
      const RuntimeOptions& options);
  ~Runtime() override;

  // Training loops -----------------------------------------------------------

  /// Sets whether the backwards that follow are the step's last. Strategies
  /// that accumulate before they communicate (ZeRO-0/1, the outer axes of HSDP
  /// and HFSDP) reduce on the last one only. Default: true.
  void set_is_last_microbatch(bool is_last);
  /// false (no_sync): gradients accumulate unsharded without any collective.
  void set_sync_gradients(bool sync);
  /// How many gradient slots may exist at once: one is filled while the others
  /// are reduced. Between two steps, equal on all ranks, and only with
  /// RuntimeOptions::slots_on_demand: an arena has room for the two of its
  /// plan.
  void set_max_grad_slots(int max_grad_slots);

  /// Returns the unit that a module is: the root, or one of
  /// FullyShardOptions::units or unit_choices. @throws Error{usage} naming the
  /// module when it is none.
  UnitId unit_of(const nn::Module& module) const;
  /// Forward hooks that this has on a module.
  std::size_t num_hooks_on(const nn::Module& module) const;
  /// Controls which units are unsharded, how long they stay so, and all-gathers
  /// on request.
  GatherControl& gathers() { return gathers_; }

  /// Returns all trainable groups, in order of units: the input of an
  /// optimizer. The Runtime owns them.
  std::vector<ParamGroup*> groups() const;
  /// Returns the same and the frozen ones, in order of units: for checkpoints,
  /// exports and other readers and writers of weights.
  std::vector<ParamGroup*> all_groups() const;
  void zero_grad();
  /// Recovers from an exception: abandons all open forwards and backwards,
  /// reshards all units, discards the step's gradients and clears errors of the
  /// streams. Collective order is safe again when all ranks call it. The next
  /// root forward after a failed backward or a failed collective does it
  /// automatically. Blocks until the communication streams are idle.
  void reset();
  /// Blocks until all queued work of this runtime's streams is done.
  void synchronize();
  /// Call after the optimizer's step: notifies observers. It is collective and
  /// blocks the host with DebugOptions::strict.
  void finish_step();

  /// Serves callers that run modules themselves.
  UnitCalls& calls() { return calls_; }
  /// Returns the CUDA graphs of its regions and steps; see
  /// graphs/model_graphs.h. fully_shard calls its `add_graphs`.
  ModelGraphs& graphs() const { return *graphs_; }
  void set_graphs(std::shared_ptr<ModelGraphs> graphs) {
    graphs_ = std::move(graphs);
  }
  /// Serves callers that run a step in another way.
  RuntimeCore& core() { return core_; }
  const RuntimeCore& core() const { return core_; }

  // Reports and tests --------------------------------------------------------

  const std::vector<std::unique_ptr<Unit>>& units() const {
    return core_.units;
  }
  const std::shared_ptr<Mesh>& mesh() const { return core_.mesh; }
  const Scheduler& scheduler() const { return core_.step.scheduler; }
  /// Slots, their plan and their addresses.
  const Executor& executor() const { return core_.executor; }
  /// Returns how long compute waits for all-gathers and reductions.
  ExposedWaits& exposed_waits() { return core_.executor.streams().exposed(); }
  RuntimeTrace trace() const;
  void clear_trace();
  /// The step that error messages name: Executor::step.
  void set_step(std::int64_t step);
  /// Adds an observer: a SlotObserver, a StepObserver, a
  /// GradientObserver or several of these (observer.h). An empty list
  /// costs nothing.
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

  // The requests of layers; runtime_layers.cpp. Each locks the mutex.
  std::optional<nn::WgradTarget> begin_wgrad_sum(
      const at::Tensor& parameter) override;
  std::optional<nn::WgradTarget> begin_wgrad(
      const at::Tensor& parameter) override;
  void end_wgrad(const at::Tensor& parameter) override;
  bool defers(const at::Tensor& parameter) override;
  void defer(const at::Tensor& parameter, nn::LateWgrad write) override;
  void recompute_begin(nn::Module& owner) override;
  std::unique_ptr<nn::StoredActivations> store(
      nn::TensorList& tensors) override;
  std::optional<nn::WeightRecipe> recipe(
      const at::Tensor& parameter) const override;
  std::optional<nn::EncodedWeight> plane(
      const at::Tensor& parameter,
      nn::PlaneUse use) override;

  RuntimeCore core_;
  std::weak_ptr<RuntimeCore> weak_core_;
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
