#pragma once

#include "flatshard/device/stream.h"

#include <cstdint>

namespace flatshard {

/// The version of weights that change, and the latest version that was
/// all-gathered. One comparison then finds recent changes. All of it is on the
/// host, except for the event after the last change.
class GatherProgress {
 public:
  /// Rises with every change of the weights.
  std::int64_t version() const { return version_; }
  /// Work that `stream` has queued changes the weights.
  /// @param encoded  it fills WeightPlanes::writer() as well.
  void advance(Stream& stream, bool encoded);
  /// Later work of `stream` reads what the last change wrote.
  void wait(Stream& stream) const { written_.wait(stream); }

  struct Step {
    bool is_first = false;  ///< since the last change
    bool encoded = false;   ///< by the last change
    bool is_first_copy = false;
  };
  /// Plans one more all-gather. It reports each change once.
  /// @param by_copies  copies of the peers' shards.
  Step next(bool by_copies);
  /// A planned all-gather may not have been carried out.
  void mark_stale() { gathered_ = copied_ = 0; }

  // A graph of steps uses this: recorded all-gathers start from a reset state
  // and wait for nothing that is not recorded.

  /// Resets the state: nothing was all-gathered and all writes have arrived.
  /// @return the former state, for `restore`.
  GatherProgress forget();
  /// Undoes `forget`. The version stays.
  void restore(const GatherProgress& forgotten);
  /// Returns whether the host has planned all all-gathers of this version that
  /// this object counts.
  bool is_gathered() const { return gathered_ == version_; }
  void mark_gathered() { gathered_ = version_; }

 private:
  std::int64_t version_ = 0;
  std::int64_t gathered_ = 0;  ///< up to which version
  std::int64_t copied_ = 0;
  std::int64_t encoded_ = 0;  ///< the version whose PlaneWriter was filled
  Event written_;
};

}  // namespace flatshard
