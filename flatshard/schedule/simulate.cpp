#include "flatshard/schedule/simulate.h"

namespace flatshard {
namespace {

constexpr TaskId kTask = 0;

void forward(
    const std::vector<UnitSpec>& units,
    UnitId u,
    std::vector<ScheduleEvent>& out) {
  out.push_back({.kind = EventKind::forward_begin, .unit = u, .call = u});
  for (UnitId child = u + 1; child < static_cast<UnitId>(units.size());
       ++child) {
    if (units[child].parent == u) {
      forward(units, child, out);
    }
  }
  out.push_back(
      {.kind = EventKind::forward_end,
       .unit = u,
       .call = u,
       .needs_backward = true});
}

void backward(
    const std::vector<UnitSpec>& units,
    const std::vector<int>& num_grads,
    UnitId u,
    std::vector<ScheduleEvent>& out) {
  out.push_back(
      {.kind = EventKind::backward_begin,
       .unit = u,
       .call = u,
       .task = kTask,
       .waits_for_inputs = true});
  for (UnitId child = static_cast<UnitId>(units.size()) - 1; child > u;
       --child) {
    if (units[child].parent == u) {
      backward(units, num_grads, child, out);
    }
  }
  for (int i = 0; i < num_grads[u]; ++i) {
    out.push_back({.kind = EventKind::wgrad_done, .unit = u, .task = kTask});
  }
  out.push_back(
      {.kind = EventKind::inputs_done, .unit = u, .call = u, .task = kTask});
}

}  // namespace

std::vector<ScheduleEvent> plain_step_events(
    const std::vector<UnitSpec>& units,
    const std::vector<int>& num_grads) {
  const auto num_units = static_cast<UnitId>(units.size());
  std::vector<ScheduleEvent> events;
  for (UnitId u = 0; u < num_units; ++u) {
    if (units[u].parent == kNoUnit) {
      forward(units, u, events);
    }
  }
  ScheduleEvent begin{.kind = EventKind::task_begin, .task = kTask};
  for (UnitId u = 0; u < num_units; ++u) {
    begin.calls.emplace_back(u, 1);
    if (num_grads[u] > 0) {
      begin.expected.emplace_back(u, num_grads[u]);
    }
  }
  events.push_back(begin);
  for (UnitId u = num_units - 1; u >= 0; --u) {
    if (units[u].parent == kNoUnit) {
      backward(units, num_grads, u, events);
    }
  }
  events.push_back(
      {.kind = EventKind::task_end, .task = kTask, .outermost = true});
  return events;
}

std::vector<Action> replay(
    Scheduler& scheduler,
    const std::vector<ScheduleEvent>& events) {
  std::vector<Action> actions;
  for (const ScheduleEvent& event : events) {
    for (const Action& action : scheduler.on(event)) {
      actions.push_back(action);
    }
  }
  return actions;
}

std::vector<Action> simulate_step(
    const std::vector<UnitSpec>& units,
    SchedulerOptions options) {
  std::vector<int> num_grads;
  for (const UnitSpec& unit : units) {
    num_grads.push_back(unit.grad_nbytes > 0 ? 1 : 0);
  }
  Scheduler scheduler(units, options);
  return replay(scheduler, plain_step_events(units, num_grads));
}

std::int64_t gathered_nbytes(
    const std::vector<UnitSpec>& units,
    const std::vector<Action>& actions) {
  std::int64_t sum = 0;
  for (const Action& a : actions) {
    if (a.kind == ActionKind::gather) {
      sum += units[a.unit].nbytes(a.plane, a.part);
    }
  }
  return sum;
}

}  // namespace flatshard
