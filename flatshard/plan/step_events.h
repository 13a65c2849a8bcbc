#pragma once

#include "flatshard/plan/job.h"

#include <vector>

namespace flatshard::plan {

/// Returns whether an event comes before the kernels of its node.
bool comes_before_kernels(EventKind kind);

/// Returns the events of each position of a plan, with reads of the planes that
/// the kernels there ask for.
std::vector<std::vector<ScheduleEvent>> step_events(
    const std::vector<PlanStep>& plan,
    const Job& job,
    const std::vector<UnitSpec>& specs);

/// Returns the units that a step gathers first, in their order: as
/// GatherControl::prefetch_forward.
/// @param actions  of the step.
/// @param prefetch  as SchedulerOptions::prefetch.
std::vector<UnitId> first_gathered(
    const std::vector<Action>& actions,
    int prefetch);

/// Returns the actions that prefetch these units for the next step.
std::vector<Action> prefetch_units(
    Scheduler& scheduler,
    const std::vector<UnitId>& units);

}  // namespace flatshard::plan
