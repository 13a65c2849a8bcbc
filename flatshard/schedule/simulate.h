#pragma once

#include "flatshard/schedule/actions.h"
#include "flatshard/schedule/events.h"
#include "flatshard/schedule/scheduler.h"

#include <cstdint>
#include <vector>

namespace flatshard {

/// Returns the events of one plain training step of these units: every unit
/// runs once in order of registration, parents around their children, and the
/// backward runs in reverse. `num_grads[u]` parameters of unit u get
/// gradients.
/// @param kept_nbytes  of each unit's call: see ScheduleEvent. Empty: nothing.
std::vector<ScheduleEvent> plain_step_events(
    const std::vector<UnitSpec>& units,
    const std::vector<int>& num_grads,
    const std::vector<std::int64_t>& kept_nbytes = {});

/// Returns the Scheduler's answers to these events.
std::vector<Action> replay(
    Scheduler& scheduler,
    const std::vector<ScheduleEvent>& events);

/// Returns the actions of `plain_step_events` in a fresh Scheduler.
std::vector<Action> simulate_step(
    const std::vector<UnitSpec>& units,
    SchedulerOptions options);

/// Returns the bytes that `actions` all-gather: the bytes of full planes and of
/// parts, not of derived planes.
std::int64_t gathered_nbytes(
    const std::vector<UnitSpec>& units,
    const std::vector<Action>& actions);

}  // namespace flatshard
