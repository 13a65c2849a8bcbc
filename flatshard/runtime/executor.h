#pragma once

#include "flatshard/device/stream.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/runtime/comm_streams.h"
#include "flatshard/runtime/kept_activations.h"
#include "flatshard/runtime/observer.h"
#include "flatshard/runtime/planned_slots.h"
#include "flatshard/runtime/runtime_options.h"
#include "flatshard/schedule/actions.h"
#include "flatshard/unit/unit.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {

/// Carries the Scheduler's actions out: on streams, with slots, by collectives.
/// It has units and time, and no autograd. One caller at a time.
class Executor {
 public:
  using Units = std::vector<std::unique_ptr<Unit>>;

  /// @param units, observers  outlive this.
  Executor(
      std::shared_ptr<Mesh> mesh,
      const Units& units,
      const RuntimeObservers& observers,
      const RuntimeOptions& options);
  /// Waits for the streams.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// @throws Error with rank, step, unit and action as its context.
  void execute(const Action& action);
  /// Called after a unit's reduction: passes its gradients to the observers
  /// that request them. Exceptions of observers get no context.
  void tell_reduced(Unit& unit);
  /// Returns whether the unit's weights may be read on compute: compute waits
  /// for their all-gather, or every rank stores all of them.
  bool has_weights(const Unit& unit) const {
    return states_[unit.id()].weights[kComputePlane].awaited || unit.resident();
  }
  /// `p` in its plane, or in the awaited part that has it. Valid until that is
  /// resharded.
  PlaneView awaited(const Unit& unit, const UnitParameter& p, PlaneId plane)
      const;
  /// Returns where layers write the unit's gradients. Allocates the slot if it
  /// does not exist yet.
  SlotView grads_slot(Unit& unit);

  /// A forward without a backward has ended: weights that others write are no
  /// longer read.
  void end_evaluation();
  /// Called before compute reads the unit's weights: compute waits until those
  /// that are not all-gathered are written.
  void wait_for_written_weights(const Unit& unit);
  /// Called when the outermost backward has finished: with
  /// RuntimeOptions::unused_grads_stay_undefined, groups without a gradient on
  /// any rank have none, and each group finds out which parameters got a
  /// gradient on some rank. Collective then.
  void drop_unused_grads();

  // Graphs of steps use these, while no slot is in use.

  /// Resets all waits for points in queued work.
  void forget_queued();
  /// Compute waits for all weights that were written.
  void wait_for_all_written_weights();

  /// Resets streams, slots and units, whatever they were at.
  void reset();
  CommStreams& streams() { return *streams_; }

  /// The step that errors and the flight recorder name.
  void set_step(std::int64_t step) { step_ = step; }
  std::int64_t step() const { return step_; }
  struct HeldSlots {
    SlotView weights;
    SlotView grads;
  };
  /// Returns the unit's present slots; data is null where it has none.
  HeldSlots held_slots(const Unit& unit) const;
  /// Returns null without RuntimeOptions::offload_activations.
  KeptActivations* kept() { return kept_.get(); }
  const KeptActivations* kept() const { return kept_.get(); }
  PlannedSlots& slots() { return slots_; }
  const PlannedSlots& slots() const { return slots_; }

 private:
  /// A plane of one unit, or a part of one, while it is unsharded.
  struct WeightSlot {
    Slot slot;     ///< resident units have none
    Event filled;  ///< the all-gather or derivation is done
    /// The same for what the gather stream derived of it or all-gathered from
    /// post-forward shards.
    Event read_by_gather;
    bool awaited = false;  ///< compute waits for `filled`
  };
  /// The slots of one unit, and how far the streams are with it.
  struct UnitState {
    std::vector<WeightSlot> weights;  ///< by slice: UnitSpec::slice
    Slot grads;
    Event grads_read;  ///< the last reduction has read the gradient slot
    Event reduced;     ///< the last reduction is done
    std::int64_t waited_for = -1;  ///< UnitWeights::generation()
  };
  /// The reduction of one group of a unit.
  struct Planned {
    ParamGroup* group = nullptr;
    at::Tensor flat;  ///< in the slot
    GradientPipeline::Reduction reduction;
    /// The outer stream's input when it gets there; null: nothing.
    std::shared_ptr<at::Tensor> inner;
  };
  /// A group that was reduced over all ranks.
  struct ReducedGroup {
    Unit* unit = nullptr;
    std::size_t group = 0;
    bool is_first = false;  ///< it had no gradient before

    GradientPipeline& gradients() const {
      return unit->groups()[group]->gradients();
    }
  };
  struct Drained {  ///< a gradient slot that may go
    Unit* unit = nullptr;
    Slot slot;
    Event last_use;
  };

  UnitState& state(const Unit& unit) { return states_[unit.id()]; }
  SlotView view(const Slot& slot) const { return slots_.view(slot); }
  // executor_weights.cpp
  WeightSlot& weight_slot(const Unit& unit, PlaneId plane, PartId part) {
    return state(unit).weights[unit.weights().planes().slice(plane, part)];
  }
  SlotView acquire_weights(
      Unit& unit,
      const Action& action,
      const std::shared_ptr<Stream>& filler);
  void gather(Unit& unit, const Action& action);
  void derive(Unit& unit, const Action& action);
  void save_post_forward(Unit& unit, const Action& action);
  void release_post_forward(Unit& unit);
  void await(Unit& unit, const Action& action);
  void release(Unit& unit, const Action& action);
  void reduce(Unit& unit, bool collective, bool is_last);
  void reduce_outer(Unit& unit, const std::vector<Planned>& planned);
  void drain(Unit& unit);
  void join();
  void release_drained();
  void rest(Unit& unit);
  std::string context(const Action& action) const;
  /// Reports to observers on the reduce stream that the gradient slot is
  /// unused. Returns the point after that.
  Event tell_unused_after_reduction(const Unit& unit);
  void tell_unused(const SlotView& slot) const;

  std::shared_ptr<Mesh> mesh_;
  const Units& units_;
  std::vector<UnitState> states_;  ///< per unit
  const RuntimeObservers& observers_;
  const RuntimeOptions options_;
  PlannedSlots slots_;
  std::shared_ptr<CommStreams> streams_;
  std::unique_ptr<KeptActivations> kept_;
  bool offloads_ = false;  ///< some group's main weights are in host memory
  Event all_reduced_;
  Event all_outer_reduced_;
  /// The slots with slots_on_demand. Compute frees them, and waits for their
  /// reductions only when it allocates the next one, or at the join.
  std::vector<Drained> drained_;
  /// In this backward.
  std::vector<ReducedGroup> reduced_groups_;
  std::int64_t step_ = 0;
};

}  // namespace flatshard
