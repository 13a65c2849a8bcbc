#pragma once

#include "flatshard/schedule/events.h"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace flatshard {

enum class ActionKind {
  gather,         ///< queue the all-gather of one plane of a unit's weights
  derive,         ///< queue the derivation of a plane from an unsharded one
  await,          ///< compute waits for it; parameters point at the slot
  release,        ///< the slot may be reused after the queued compute
  acquire_grads,  ///< a gradient slot is needed from here on
  reduce,         ///< queue the reduction of a unit's gradients
  accumulate,     ///< add a unit's gradients to its local sum, no collective
  drain,          ///< the gradient slot may be reused after the reduction
  join,           ///< compute waits for all reductions
  // On the kept activations of a call (ScheduleEvent::kept_nbytes):
  download,        ///< queue its copy to the host
  drain_download,  ///< its memory on the device is free after the copy
  upload,          ///< queue its copy into other memory of the device
  await_upload,    ///< compute waits for that
  release_kept,    ///< its places on device and host are free after the queued
                   ///< compute
};

struct Action {
  ActionKind kind{};
  UnitId unit = kNoUnit;
  PlaneId plane = 0;             ///< of gather, derive, await or release
  Phase phase = Phase::forward;  ///< of a gather or derive: for which use
  /// For a reduction: its backward started as the step's last.
  bool is_last = true;
  PartId part = kWhole;  ///< of gather, derive, await or release
  /// For a gather: all-gather the slices of UnitSpec::post_forward among the
  /// ranks that have all of them; else the stored shards.
  bool from_post_forward = false;
  bool by_program = false;  ///< of a gather: ScheduleEvent::by_program
  CallId call = -1;         ///< of `unit`, for the actions on what it keeps
  std::int64_t nbytes = 0;  ///< of a download or upload

  bool operator==(const Action&) const = default;
};

std::string_view to_string(ActionKind kind);

/// e.g. `gather(2) await(1) join`; backward gathers are written `gather'(2)`.
/// Plane 0 is implied. Another plane of unit 2 is written `gather(2.1)`, and
/// its part 3 `gather(2.1:3)`. A gather from UnitSpec::post_forward is written
/// `gather'(2 post_forward)`.
std::string to_string(std::span<const Action> actions);

}  // namespace flatshard
