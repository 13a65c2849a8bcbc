#pragma once

#include "flatshard/schedule/events.h"

#include <cstdint>

namespace flatshard {

struct RuntimeCore;

/// The unsharded units of a model, how long they stay so, and all-gathers on
/// request: `Runtime::gathers()`. Every call is equal on all ranks.
class GatherControl {
 public:
  explicit GatherControl(RuntimeCore& core) : core_(core) {}
  GatherControl(const GatherControl&) = delete;
  GatherControl& operator=(const GatherControl&) = delete;

  /// Takes effect from the next event on; between two steps. Overrides
  /// RuntimeOptions::reshard_after_forward.
  void set_policy(UnitId unit, UnitPolicy policy);
  /// From now on, keeps as many units as fit unsharded from forward to
  /// backward. The slots of unsharded weights and gradients use at most
  /// `nbytes` then. Call it before the first forward.
  /// @return  how many; see choose_kept_units.
  int keep_gathered(std::int64_t nbytes);
  /// All-gathers the unit's weights outside its forward, so that any code can
  /// read its parameters. Collective. Its next forward or backward uses them
  /// and reshards them as always.
  /// @param awaits  false: only queue it; call again before you read them.
  void unshard(UnitId unit, bool awaits = true);
  /// Unshards the first units of the last step's forward ahead of the next one.
  /// Call it after the optimizer if another forward follows. The all-gather of
  /// a unit waits only for its own weights and runs in parallel with the
  /// optimizer's work on later units. Collective; never blocks. Does nothing
  /// with GraphOptions::whole_step.
  void prefetch_forward();
  /// Reshards them, unless a forward or backward of the unit is open.
  void reshard(UnitId unit);

 private:
  RuntimeCore& core_;
};

}  // namespace flatshard
