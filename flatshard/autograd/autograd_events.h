#pragma once

#include "flatshard/autograd/autograd_call.h"
#include "flatshard/autograd/autograd_node.h"
#include "flatshard/nn/visit.h"
#include "flatshard/schedule/events.h"
#include "flatshard/unit/unit.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace flatshard {

/// Parameter `index` of a unit.
struct ParameterRef {
  UnitId unit = kNoUnit;
  std::size_t index = 0;
};

/// The owner of an AutogradEvents: the Runtime.
///
/// The owner has the lock, AutogradEvents has none. Autograd's hooks run on
/// threads of the engine and call the first three functions without it. Each of
/// these locks it and calls the function of AutogradEvents that it names.
/// AutogradEvents calls all others under the lock of its caller. Exceptions
/// from them end the forward or backward that runs.
class AutogradListener {
 public:
  virtual ~AutogradListener() = default;

  /// AutogradEvents::tensor_grad.
  virtual void on_tensor_grad(const WatchedTensor& tensor) = 0;
  /// AutogradEvents::parameter_done.
  virtual void on_parameter_done(ParameterRef parameter) = 0;
  /// AutogradEvents::task_end.
  virtual void on_task_end(TaskId task) = 0;

  /// Passes an event to the Scheduler.
  virtual void feed(const ScheduleEvent& event) = 0;
  /// A forward starts and nothing is known of it yet. May call
  /// AutogradEvents::reset, if it is an outermost one.
  /// @param outermost  no other forward is open, and no backward runs.
  virtual void forward_begins(UnitId unit, bool outermost) = 0;
  /// The first event of a backward arrived and nothing is known of it yet. May
  /// call AutogradEvents::reset.
  virtual void task_begins() = 0;
  /// The backward of a call starts.
  virtual void backward_begins(UnitId unit, CallId call) = 0;
};

/// Follows a program's use of its units, by hooks on tensors and gradient
/// accumulators, and reports it as ScheduleEvents. It has calls, graph tasks
/// and parameters, and no streams, slots or Scheduler.
///
/// One caller at a time: AutogradListener documents the locks.
class AutogradEvents {
 public:
  using Units = std::vector<std::unique_ptr<Unit>>;

  /// @param units, listener  outlive this.
  AutogradEvents(const Units& units, AutogradListener& listener);
  /// Removes the hooks from the accumulators. The hooks of tensors do nothing
  /// any more once the `hooks` of install_hooks are gone.
  ~AutogradEvents();
  AutogradEvents(const AutogradEvents&) = delete;
  AutogradEvents& operator=(const AutogradEvents&) = delete;

  /// Watches the accumulators of all trained parameters. Once.
  /// @param hooks  the listener; hooks have this weak pointer.
  /// @throws Error{usage} for a parameter that is not a leaf.
  void install_hooks(std::weak_ptr<AutogradListener> hooks);

  /// While it exists, parameters have accumulators that belong to the current
  /// stream, watched like the accumulators of install_hooks: these belong to
  /// the stream that was current then, and a recording may not wait for another
  /// stream.
  class OwnAccumulators;

  // Forwards -----------------------------------------------------------------

  /// @param inputs  tensors that the unit receives, as they are.
  void forward_begin(UnitId unit, const nn::TensorList& inputs);
  struct EndedForward {
    CallId call = -1;
    bool needs_backward = false;
    bool outermost = false;  ///< as AutogradListener::forward_begins had it
  };
  /// @param outputs  tensors that it returns, as they are.
  /// @param more_follow, runs_later  see UnitCalls::forward_end.
  EndedForward forward_end(
      UnitId unit,
      const nn::TensorList& outputs,
      bool more_follow,
      bool runs_later = false);
  /// Called instead of forward_end, after an exception.
  void forward_error(UnitId unit);
  struct OpenCall {
    UnitId unit = kNoUnit;
    CallId call = -1;
  };
  /// The innermost open forward keeps `nbytes` more for its backward
  /// (ScheduleEvent::kept_nbytes).
  /// @return  that forward; nullopt: none is open, or it is a recompute.
  std::optional<OpenCall> add_kept(std::int64_t nbytes);
  /// A backward may start with the gradients of these `tensors` of the open
  /// forward of `unit`, and not with the gradients of its outputs.
  void watch_inner(UnitId unit, const nn::TensorList& tensors);
  /// The calls of `unit` computed with the weights that it has now.
  void stamp(UnitId unit);

  // Backwards ----------------------------------------------------------------

  /// Reports that the running backward starts, if this is its first event.
  /// @param arrived  the parameter whose gradient is that event, or null.
  /// @param first  the tensor whose gradient is that event, or null. The engine
  ///   does not count the first node of a backward among its own.
  /// @return  the graph task.
  /// @throws Error{usage} when a parameter got a gradient outside a backward.
  TaskId enter_task(
      const UnitParameter* arrived = nullptr,
      const WatchedTensor* first = nullptr);
  /// The gradient of a watched tensor is complete.
  void tensor_grad(const WatchedTensor& tensor);
  /// A parameter's accumulator ran. The gradient that it left in `.grad` is
  /// moved to UnitGradients::add.
  void parameter_done(ParameterRef parameter);
  /// A layer is to write the gradient of `parameter`.
  /// @return  the parameter; null: not one of the units', frozen, or without a
  ///   gradient in the backward that runs.
  /// @throws Error{usage} outside a backward.
  const ParameterRef* wgrad_begins(const at::Tensor& parameter);
  /// Ends a graph task.
  /// @return  whether the outermost backward has ended. False also for one that
  ///   a reset dropped.
  bool task_end(TaskId task);

  /// Handles units whose caller reports their starts and ends.
  class Passes {
   public:
    explicit Passes(AutogradEvents& events) : events_(events) {}
    Passes(const Passes&) = delete;
    Passes& operator=(const Passes&) = delete;

    /// Starts the forward of a unit without watched tensors.
    std::shared_ptr<UnitCall> begin_call(UnitId unit);
    /// @param more_follow  see ScheduleEvent::more_follow
    void end_call(UnitCall& call, bool more_follow);
    /// From here to its task_end all runs of the engine are one backward.
    /// @param units  each starts its backward in it once.
    /// @param alive  expires without a task_end when something threw.
    TaskId open(
        const std::vector<UnitId>& units,
        bool interleaved,
        std::weak_ptr<void> alive);
    void begin_backward(UnitCall& call);
    /// Handles an event of a call inside the open pass: recompute_begin,
    /// recompute_end, inputs_done.
    void event(EventKind kind, const UnitCall& call);
    /// A layer keeps the gradient of `parameter` for later.
    void put_off(ParameterRef parameter);
    void late_wgrad_done(ParameterRef parameter);
    /// Forgets forwards and backwards of passes that will not be ended.
    void give_up();

   private:
    void check_open(const UnitCall& call) const;

    AutogradEvents& events_;
  };
  Passes& passes() { return passes_; }

  /// Forgets open forwards and backwards that run.
  void reset();
  /// Forgets tensors whose graph is gone, and the calls that made them.
  void forget_dead_tensors();
  /// Returns the number of calls and tensors that are not forgotten.
  std::size_t num_remembered() const { return calls_.size() + watched_.size(); }

  // The running tasks --------------------------------------------------------

  /// Returns whether the calling thread is in a backward.
  static bool in_backward();
  /// Returns whether a forward is open that is not a recompute.
  bool in_forward() const;
  /// Returns whether a forward or a recompute is open, of any unit or of
  /// `unit`.
  bool is_open() const { return !open_calls_.empty(); }
  bool is_open(UnitId unit) const;
  /// Returns whether a backward has had its first event and not its end.
  bool in_task() const { return !tasks_.empty(); }
  /// Returns whether some backward threw: the engine drops the end of such a
  /// one.
  bool has_dead_task() const;

  /// Returns the parameter that `tensor` is, or null. Found by its TensorImpl.
  const ParameterRef* find(const at::Tensor& tensor) const;

 private:
  /// An owning pointer: autograd has a weak one, and without it no hook fires.
  /// Null: frozen.
  struct Accumulator {
    NodePtr node;
    std::uintptr_t hook_id = 0;
  };

  using Accumulators = std::vector<std::vector<Accumulator>>;

  void hook_parameters();
  void hook_parameter(ParameterRef parameter);
  static void unhook(const Accumulators& accumulators);
  WatchedTensor& watch(const at::Tensor& tensor);
  void watch_inputs(
      const std::shared_ptr<UnitCall>& call,
      const nn::TensorList& inputs);
  bool watch_outputs(
      const std::shared_ptr<UnitCall>& call,
      const nn::TensorList& outputs);
  std::vector<std::shared_ptr<UnitCall>> calls_of_task(
      const WatchedTensor* first);
  void begin_backward(UnitCall& call, TaskId task);
  void begin_backward_up_to(const std::shared_ptr<UnitCall>& call, TaskId task);
  void input_grad_arrived(const std::shared_ptr<UnitCall>& call, TaskId task);
  UnitParameter& parameter(ParameterRef ref) const {
    return units_[ref.unit]->parameters()[ref.index];
  }

  const Units& units_;
  AutogradListener& listener_;
  std::weak_ptr<AutogradListener> hooks_;

  std::unordered_map<const c10::TensorImpl*, ParameterRef> parameters_;
  Accumulators accumulators_;  ///< per unit
  /// Calls whose forward is open, innermost last; recomputes included.
  std::vector<std::shared_ptr<UnitCall>> open_calls_;
  /// Calls that may have a backward.
  std::vector<std::weak_ptr<UnitCall>> calls_;
  /// The key is the tensor's autograd node and its number among the node's
  /// outputs.
  std::
      map<std::pair<const void*, std::uint32_t>, std::shared_ptr<WatchedTensor>>
          watched_;
  std::map<TaskId, BackwardTask> tasks_;
  std::optional<TaskId> pass_;  ///< that is open
  TaskId last_pass_ = -1;
  /// The gradients delayed in the run of the engine, by unit and index.
  std::map<std::pair<UnitId, std::size_t>, int> put_off_;
  Passes passes_{*this};
  CallId next_call_ = 0;
  std::int64_t next_end_ = 0;
};

class AutogradEvents::OwnAccumulators {
 public:
  /// No forward or backward is open at either end.
  explicit OwnAccumulators(AutogradEvents& events);
  ~OwnAccumulators();
  OwnAccumulators(const OwnAccumulators&) = delete;
  OwnAccumulators& operator=(const OwnAccumulators&) = delete;

 private:
  AutogradEvents& events_;
  Accumulators others_;
};

}  // namespace flatshard
