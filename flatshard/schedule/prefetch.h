#pragma once

#include "flatshard/schedule/actions.h"
#include "flatshard/schedule/events.h"

#include <span>
#include <vector>

namespace flatshard {

/// Returns the units that a step unshards first, in their order. The next step
/// can find them unsharded.
/// @param actions  of the step.
/// @param prefetch  SchedulerOptions::prefetch.
std::vector<UnitId> first_gathered(
    std::span<const Action> actions,
    int prefetch);

/// Returns the event that unshards such a unit ahead of the next step.
ScheduleEvent prefetch_event(UnitId unit);

}  // namespace flatshard
