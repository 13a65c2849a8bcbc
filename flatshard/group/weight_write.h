#pragma once

#include <vector>

#include "flatshard/device/stream.h"
#include "flatshard/group/param_group.h"

namespace flatshard {

/// One write of the weights of some groups: the only way to write them, for
/// optimizers, loaders and initialization.
///
///     WeightWrite write(groups, *stream);
///     for (ParamGroup* group : groups) {
///       stream->submit([&] { ... writes group->weights().main() ... });
///       write.end(*group, WeightWrite::Cast::here);
///     }
///
/// Collective where ranks read each other's weights (copy gathers).
class WeightWrite {
 public:
  /// Selects the code that brings the compute weights up to date.
  enum class Cast {
    /// `end` casts main, on the stream of the write. Planes that are encoded
    /// (StoragePlan::encodes) wait for the next all-gather.
    here,
    /// The writer of main filled compute_shard() as well, and writer().
    by_writer,
  };

  /// Adopts foreign writes and waits until the old values are no longer read:
  /// later work of `stream` may write. Queues on the current stream.
  WeightWrite(std::vector<ParamGroup*> groups, Stream& stream);
  WeightWrite(const WeightWrite&) = delete;
  WeightWrite& operator=(const WeightWrite&) = delete;
  /// Groups that an exception left without `end` count as written.
  ~WeightWrite();

  /// The work that writes `group` is queued on the stream, or done.
  void end(ParamGroup& group, Cast cast);

 private:
  std::vector<ParamGroup*> open_;
  Stream& stream_;
};

}  // namespace flatshard
