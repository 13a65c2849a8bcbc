#pragma once

#include "flatshard/schedule/events.h"
#include "flatshard/schedule/scheduler.h"

#include <cstdint>
#include <vector>

namespace flatshard {

/// Turns memory into speed: which units to leave gathered from forward to
/// backward (UnitPolicy::reshard_after_forward = false), so that their second
/// gather disappears. It keeps as many as possible while the slots of a plain
/// step stay within `nbytes`, from the one that runs last on: its weights are
/// held the shortest. Units of which each plane is gathered once anyway are not
/// among them.
///
/// @return  empty when the slots exceed `nbytes` without any.
std::vector<UnitId> choose_kept_units(
    std::vector<UnitSpec> units,
    SchedulerOptions options,
    std::int64_t nbytes);

}  // namespace flatshard
