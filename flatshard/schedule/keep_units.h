#pragma once

#include "flatshard/schedule/events.h"
#include "flatshard/schedule/scheduler.h"

#include <cstdint>
#include <vector>

namespace flatshard {

/// Turns memory into speed: which units to leave unsharded from forward to
/// backward (UnitPolicy::reshard_after_forward = false), so that their second
/// all-gather disappears. It keeps as many as possible while the slots of a
/// plain step stay within `nbytes`. It starts with the unit that runs last,
/// because its weights stay for the shortest time. Excludes units with planes
/// that are all-gathered only once anyway.
///
/// @return  empty when the slots exceed `nbytes` without any.
std::vector<UnitId> choose_kept_units(
    std::vector<UnitSpec> units,
    SchedulerOptions options,
    std::int64_t nbytes);

}  // namespace flatshard
