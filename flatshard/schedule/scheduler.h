#pragma once

#include "flatshard/schedule/actions.h"
#include "flatshard/schedule/events.h"

#include <deque>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace flatshard {

struct SchedulerOptions {
  /// Units unsharded ahead of the one that computes.
  int prefetch = 1;
  /// Gradient slots of leaf units that may exist at once: one is filled while
  /// the other is reduced.
  int max_grad_slots = 2;

  bool operator==(const SchedulerOptions&) const = default;
};

/// Decides what is unsharded, resharded and reduced, and the order.
///
/// Pure: events in, actions out, no tensors and no time. Every rank feeds the
/// same events and so launches the same collectives in the same order. Three
/// parties carry the actions out: the Executor (streams), the simulator (bytes)
/// and the tests (plain lists).
///
/// Order is predicted, never assumed: the units' order of registration serves
/// the first step, the recorded order of the last forward and backward every
/// later one. A program that leaves the prediction only loses prefetches.
///
/// A forward belongs to a root, or to a path of calls from outside: units that
/// a program calls one after the other, without their root. Each has a separate
/// order, and a single unit's own call changes neither.
class Scheduler {
 public:
  Scheduler(std::vector<UnitSpec> units, SchedulerOptions options);

  /// SchedulerOptions::max_grad_slots, from the next event on.
  void set_max_grad_slots(int max_grad_slots);

  /// Processes one event and returns the actions it causes, in launch order.
  /// @throws Error{usage} when the event cannot follow the ones before it,
  /// naming the unit.
  std::vector<Action> on(const ScheduleEvent& event);

  /// Takes effect from the next event on. Equal on all ranks.
  /// @throws Error{usage} for a unit that does not exist.
  void set_policy(UnitId unit, UnitPolicy policy);
  /// @throws Error{usage} for a unit that does not exist.
  const UnitPolicy& policy(UnitId unit) const;

  const std::vector<UnitSpec>& units() const { return units_; }
  const SchedulerOptions& options() const { return options_; }

  /// Returns whether only resident weights are unsharded, no forward or
  /// backward is open and no gradient waits to be reduced. Ignores units that
  /// `unshard` unsharded or that their policy keeps.
  bool resting() const;
  /// Returns names of the units that are not idle, for an error message.
  std::vector<std::string> busy_units() const;
  /// Returns the planes of `unit`, and the parts (UnitSpec::slice), that are
  /// unsharded or have a queued all-gather.
  PlaneSet gathered_planes(UnitId unit) const { return state_[unit].present; }
  /// Returns the number of units with an unsharded plane.
  int num_gathered() const;
  /// Returns true while a forward outside any backward is open.
  bool in_forward() const { return !open_forwards_.empty(); }
  /// Returns the same of one unit.
  bool in_forward(UnitId unit) const;
  /// Returns the reduction of the gradients that the running backward computes
  /// for `unit`.
  Action next_reduction(UnitId unit) const;
  /// Units with children are reduced at the end of the outermost backward.
  bool has_children(UnitId unit) const { return has_children_[unit]; }

  bool operator==(const Scheduler&) const = default;

 private:
  /// One unit's backward of one call inside one graph task.
  struct BackwardCall {
    CallId call;
    TaskId task;
    bool inputs_done;

    bool operator==(const BackwardCall&) const = default;
  };

  /// The pending results of a running backward, per unit.
  struct Task {
    std::map<UnitId, int> calls;
    std::map<UnitId, int> grads;
    std::map<UnitId, int> deferred;  ///< grads that read no weights any more

    bool operator==(const Task&) const = default;
  };

  /// Slices that kernels requested in a backward beyond what it reads anyway.
  struct Asked {
    PlaneSet in_recompute;  ///< between recompute_begin and its end
    PlaneSet in_backward;   ///< otherwise, e.g. a recompute of a part

    bool operator==(const Asked&) const = default;
  };

  /// Why weights are unsharded while no forward or backward of the unit reads
  /// them. They end together, when all of the unit is resharded. No phase of
  /// the unit excludes them: with two microbatches in flight it may run the
  /// backward of one, be kept for the other, and be prefetched.
  struct Holds {
    bool by_program = false;  ///< unsharded on demand: may outlive a backward
    /// For modules of the unit that are still to run in this forward.
    bool waits = false;
    bool needs_backward = false;     ///< its last forward, while it waits
    bool ahead_of_forward = false;   ///< prefetched, and not started
    bool ahead_of_backward = false;  ///< likewise
    /// The last call after which it stayed unsharded at the end of its forward,
    /// and that has not started its backward. Backwards of earlier calls start
    /// before.
    std::optional<CallId> kept_call;

    bool operator==(const Holds&) const = default;
  };

  struct UnitState {
    // Sets of slices: planes, and parts of planes.
    PlaneSet present;  ///< unsharded, or queued
    PlaneSet awaited;  ///< of these, what compute waits for
    PlaneSet saved;    ///< of these, what was derived for the backward
    Asked asked;       ///< in the running backward
    Asked learned;     ///< in the one before
    Holds holds;
    /// A graph of second derivatives may read the weights.
    bool read_by_graph = false;
    int open_recomputes = 0;
    std::vector<BackwardCall> backward_calls;

    bool operator==(const UnitState&) const = default;
  };

  /// Activations that one call keeps for its backward, on the host in between.
  struct Kept {
    enum class Place { leaving, host, loaded };

    UnitId unit = kNoUnit;
    CallId call = -1;
    std::int64_t nbytes = 0;
    /// leaving: on the device, while the host gets a copy.
    Place place = Place::leaving;
    bool is_read = false;  ///< by kernels of its backward

    bool operator==(const Kept&) const = default;
  };

  using Actions = std::vector<Action>;

  void check_exists(UnitId unit) const;

  // Between steps, and what forward and backward share; scheduler.cpp.
  void weights_changed(Actions& out);
  void unit_written(UnitId unit, Actions& out);
  void unshard(const ScheduleEvent& event, Actions& out);
  void reshard(const ScheduleEvent& event, Actions& out);
  void reset(Actions& out);
  /// Returns the position after the next occurrence of `unit`, looking from
  /// `from` and then from the start; the size when it does not occur.
  static std::size_t position_after(
      const std::vector<UnitId>& order,
      std::size_t from,
      UnitId unit);
  /// Returns the units to unshard ahead, in order.
  std::vector<UnitId> ahead(
      const std::vector<UnitId>& order,
      std::size_t position,
      const std::optional<std::vector<UnitId>>& chosen,
      Phase phase) const;
  void prefetch(const std::vector<UnitId>& units, Phase phase, Actions& out);

  // Planes and their parts; scheduler_planes.cpp. A set is one of slices.
  /// All-gathers the slices that are missing; `phase` is their purpose.
  void gather(UnitId unit, PlaneSet slices, Phase phase, Actions& out);
  /// Awaits the slices that no kernel requests when it needs them.
  void await(UnitId unit, PlaneSet slices, Actions& out);
  void await_slices(UnitId unit, PlaneSet slices, Actions& out);
  /// Reshards the slices that are unsharded.
  void release(UnitId unit, PlaneSet slices, Actions& out);
  void read(const ScheduleEvent& event, Actions& out);
  /// Returns the planes that `phase` reads, divided as they are
  /// all-gathered.
  PlaneSet wanted(UnitId unit, Phase phase) const;
  PlaneSet in_pieces(UnitId unit, PlaneSet planes) const;
  /// Returns the pieces to all-gather for the requested
  /// slices.
  PlaneSet learned(UnitId unit, PlaneSet asked) const;
  /// Returns the planes that stay after a backward by
  /// UnitPolicy::keep_backward_planes.
  PlaneSet kept_planes(UnitId unit) const;
  /// Returns the planes without a reader when a forward or a recompute has
  /// finished and the unit stays for its backward.
  PlaneSet unread_in_backward(UnitId unit) const;
  /// Returns whether a unit that is resharded after a forward keeps its slice
  /// of the weights for the backward (UnitSpec::post_forward).
  bool keeps_post_forward(UnitId unit) const;
  /// Makes that slice of the unsharded plane.
  void save_post_forward(UnitId unit, Actions& out);
  /// Serves a unit that stays for its backward: derives its planes from planes
  /// that are still unsharded, and reshards those that it does not read.
  void keep_for_backward(UnitId unit, Actions& out);

  // Forwards, their order, recomputes; scheduler_forward.cpp.
  void forward_begin(const ScheduleEvent& event, Actions& out);
  void forward_end(const ScheduleEvent& event, Actions& out);
  /// Adds the unit, but only once for calls without another all-gather between
  /// them, for example calls of two microbatches.
  void record(std::vector<UnitId>& order, UnitId unit);
  void outer_forward_begin(UnitId unit);
  void outer_forward_end(UnitId unit, bool needs_backward, Actions& out);
  bool is_root(UnitId unit) const { return units_[unit].parent == kNoUnit; }
  /// Returns the order of the forward that runs.
  const std::vector<UnitId>& forward_order() const;
  void recompute_begin(const ScheduleEvent& event, Actions& out);
  void recompute_end(const ScheduleEvent& event, Actions& out);
  /// Reshards what was unsharded only for a recompute, once none is open.
  /// @param still_read  not these.
  void end_recompute(UnitId unit, PlaneSet still_read, Actions& out);

  // Kept activations of calls; scheduler_kept.cpp.
  void download_kept(const ScheduleEvent& event, Actions& out);
  std::vector<Kept>::iterator find_kept(CallId call);
  /// Loads it from the host, if it is only there.
  static void load(Kept& kept, Actions& out);
  /// Loads what the call kept, and ahead of its backward what the call before
  /// it kept.
  void load_for_backward(CallId call, Actions& out);
  void kept_read(const ScheduleEvent& event, Actions& out);
  void kept_done(const ScheduleEvent& event, Actions& out);

  // Graph tasks, the backwards of units, gradients; scheduler_backward.cpp.
  void task_begin(const ScheduleEvent& event);
  void backward_begin(const ScheduleEvent& event, Actions& out);
  void wgrad_done(const ScheduleEvent& event, Actions& out);
  void wgrad_deferred(const ScheduleEvent& event, Actions& out);
  void inputs_done(const ScheduleEvent& event, Actions& out);
  void task_end(const ScheduleEvent& event, Actions& out);
  void release_after_backward(UnitId unit, Actions& out);
  void end_backward(UnitId unit, Actions& out);
  /// Returns the planes that the other microbatch needs of a unit at the end of
  /// the unit's backward.
  PlaneSet wanted_by_others(UnitId unit) const;
  Task& task_of_gradient(const ScheduleEvent& event);
  /// More of its calls, or gradients, will follow in a running backward.
  bool is_pending(UnitId unit) const;
  bool awaits_deferred(UnitId unit) const;
  /// Returns whether its gradient slot is being filled.
  bool fills_grads(UnitId unit) const;
  void queue_grads(UnitId unit, Actions& out);
  /// The queued units with a started backward are due; `current` still
  /// computes.
  void reduce_ready(UnitId current, Actions& out);
  /// Reduces the units that are due, in order, up to the first one that still
  /// waits for gradients.
  void reduce_due(Actions& out);
  /// Returns whether all calls of its backward have started.
  bool has_begun(UnitId unit) const;
  void reduce(UnitId unit, Actions& out);
  /// Returns whether both the `microbatch` event and the unit's policy request
  /// a reduction.
  bool syncs(UnitId unit) const;
  bool is_last(UnitId unit) const;
  void drain_down_to(std::size_t num_slots, Actions& out);
  std::size_t num_leaf_grad_slots() const;

  std::vector<UnitSpec> units_;
  SchedulerOptions options_;
  std::vector<UnitState> state_;
  std::vector<bool> has_children_;
  bool all_resident_ = true;

  // The prediction, and what is recorded now to become the next one.
  std::vector<UnitId> root_order_;
  std::vector<UnitId> path_order_;  ///< empty: no path was seen
  std::vector<UnitId> backward_order_;
  std::vector<UnitId> recorded_forward_;
  std::vector<UnitId> recorded_ends_;
  std::vector<UnitId> recorded_backward_;
  std::vector<UnitId> outer_calls_;  ///< of the path that is recorded
  bool path_ended_ = true;
  std::size_t forward_position_ = 0;
  std::size_t backward_position_ = 0;

  std::vector<UnitId> open_forwards_;  ///< a stack
  std::vector<Kept> kept_;             ///< in the order of the forwards' ends
  std::map<TaskId, Task> tasks_;
  std::set<TaskId> unreduced_tasks_;
  std::vector<UnitId> grad_queue_;  ///< slots being filled, in order of start
  /// The units that are reduced next, in this order on all ranks: each waits
  /// for its last gradient, and for the units before it.
  std::vector<UnitId> due_;
  std::deque<UnitId> reducing_;  ///< reduced, not yet drained
  /// The last `microbatch` event, and its state at the start of the outermost
  /// backward: a reduction belongs to that state.
  struct Microbatch {
    bool is_last = true;
    bool sync = true;

    bool operator==(const Microbatch&) const = default;
  };
  Microbatch next_;
  Microbatch running_;
  bool interleaved_ = false;  ///< so is the outermost backward
};

}  // namespace flatshard
