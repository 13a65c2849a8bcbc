#pragma once

#include "flatshard/nn/module.h"
#include "flatshard/nn/weight_source.h"
#include "flatshard/schedule/events.h"

#include <vector>

namespace flatshard {

struct RuntimeCore;

/// Serves callers that run modules themselves: `Runtime::calls()`. Hooks of
/// nn::Module do it for a Unit that has one.
class UnitCalls {
 public:
  explicit UnitCalls(RuntimeCore& core) : core_(core) {}
  UnitCalls(const UnitCalls&) = delete;
  UnitCalls& operator=(const UnitCalls&) = delete;

  /// @param inputs  tensors that the module receives, as they are.
  void forward_begin(UnitId unit, const nn::TensorList& inputs);
  /// @param outputs  tensors that it returns, as they are.
  /// @param more_follow  other modules of the unit will run in this forward:
  ///   the unit's weights stay unsharded for them, until the outermost forward
  ///   ends.
  /// @param runs_later  the result may compute with the unit's weights, or have
  ///   a backward, that no tensor of `outputs` shows.
  void forward_end(
      UnitId unit,
      const nn::TensorList& outputs,
      bool more_follow = false,
      bool runs_later = false);
  /// Called instead of forward_end, after an exception.
  void forward_error(UnitId unit);
  /// Inside the forward of `unit`: the program keeps these intermediate tensors
  /// and may call backward only on them.
  void keeps_inner(UnitId unit, const nn::TensorList& tensors);
  /// Returns whether a forward is open, of any unit.
  bool in_forward() const;
  /// Called before a forward of `unit` inside another: its weights were written
  /// since that one started (WeightPlanes::mark_foreign_write). Weights that
  /// were unsharded ahead are all-gathered again.
  void weights_written(UnitId unit);
  /// Called after a write to the unsharded weights of `unit`, while they could
  /// be read, and of the same values to its main weights. It does not count as
  /// a write between a forward and its backward. Equal on all ranks.
  void gathered_written(UnitId unit);

  /// The plane that `use` reads of an encoded weight, or the part that has it,
  /// is all-gathered, and compute waits for it.
  /// @return  where its data are.
  /// @throws Error{usage} outside the unit's forward and backward.
  const void* await_plane(const at::Tensor& parameter, nn::PlaneUse use);

  /// Steps consist of passes with these events from now on, with this many
  /// gradient slots at once: lays out the arena for them. Between two steps,
  /// equal on all ranks.
  void plan_passes(
      const std::vector<ScheduleEvent>& events,
      int max_grad_slots);

 private:
  RuntimeCore& core_;
};

}  // namespace flatshard
