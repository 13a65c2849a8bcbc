#pragma once

#include "flatshard/device/stream.h"

#include <cstdint>

namespace flatshard {

/// The version of weights that change, and up to which version somebody has
/// gathered them. One comparison then finds recent changes. It is on the host
/// alone, except for the event after the last change.
class GatherProgress {
 public:
  /// Rises with every change of the weights.
  std::int64_t version() const { return version_; }
  /// Work that `stream` has queued changes the weights.
  /// @param float8_begun  it makes WeightPlanes::float8_outputs() as well.
  void advance(Stream& stream, bool float8_begun);
  /// Later work of `stream` sees what the last change wrote.
  void wait(Stream& stream) const { written_.wait(stream); }

  struct Step {
    bool is_first = false;      ///< since the last change
    bool float8_begun = false;  ///< by the last change
    bool is_first_copy = false;
  };
  /// Plans one gather more. It reports each change once.
  /// @param by_copies  of what the peers hold.
  Step next(bool by_copies);
  /// A gather that was planned may not have been carried out.
  void mark_stale() { gathered_ = copied_ = 0; }

  // A graph of steps uses this: recorded gathers begin anew and wait for
  // nothing that is not recorded.

  /// Resets the state, as if nothing was gathered and all writes had arrived.
  /// @return what was forgotten, for `restore`.
  GatherProgress forget();
  /// Undoes `forget`. The version stays.
  void restore(const GatherProgress& forgotten);
  /// Returns whether all gathers of this version are planned, as far as this
  /// goes.
  bool is_gathered() const { return gathered_ == version_; }
  void mark_gathered() { gathered_ = version_; }

 private:
  std::int64_t version_ = 0;
  std::int64_t gathered_ = 0;  ///< up to which version
  std::int64_t copied_ = 0;
  std::int64_t float8_begun_ = 0;  ///< the version with float8_outputs
  Event written_;
};

}  // namespace flatshard
