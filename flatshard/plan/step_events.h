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

}  // namespace flatshard::plan
