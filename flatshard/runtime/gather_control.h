#pragma once

#include "flatshard/schedule/events.h"

#include <cstdint>

namespace flatshard {

struct RuntimeCore;

/// The gathered units of a model, how long they stay, and gathers that a
/// program asks for: `Runtime::gathers()`. Every call is equal on all ranks.
class GatherControl {
 public:
  explicit GatherControl(RuntimeCore& core) : core_(core) {}
  GatherControl(const GatherControl&) = delete;
  GatherControl& operator=(const GatherControl&) = delete;

  /// Takes effect from the next event on; between two steps. Overrides
  /// RuntimeOptions::reshard_after_forward.
  void set_policy(UnitId unit, UnitPolicy policy);
  /// Keeps as many units as fit gathered from forward to backward from now on.
  /// The slots of gathered weights and gradients take at most `nbytes` then.
  /// Before the first forward.
  /// @return  how many; see choose_kept_units.
  int keep_gathered(std::int64_t nbytes);
  /// Gathers the unit's weights outside of its forward, and lets everybody
  /// read its parameters. Collective. Its next forward or backward uses them
  /// and releases them as always.
  /// @param awaits  false: only queued; ask again before you read them.
  void unshard(UnitId unit, bool awaits = true);
  /// Gathers the first units of the last step's forward, so that they are
  /// gathered when the next one begins. Call it after the optimizer, when
  /// another forward comes. The gather of a unit waits for its own weights only
  /// and runs in parallel with the optimizer's work on later units. Collective;
  /// never blocks. Does nothing with GraphOptions::whole_step.
  void prefetch_forward();
  /// Releases them, unless a forward or backward of the unit is open.
  void reshard(UnitId unit);

 private:
  RuntimeCore& core_;
};

}  // namespace flatshard
