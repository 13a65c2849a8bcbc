#include "flatshard/schedule/simulate.h"

#include <utility>

namespace flatshard {
namespace {

constexpr TaskId kTask = 0;

// The events of one plain step, unit by unit.
struct PlainStep {
  void forward(UnitId u) {
    add(EventKind::forward_begin, u);
    for (UnitId child = u + 1; child < num_units(); ++child) {
      if (units[child].parent == u) {
        forward(child);
      }
    }
    ScheduleEvent& end = add(EventKind::forward_end, u);
    end.needs_backward = true;
    end.kept_nbytes = kept(u);
  }

  void backward(UnitId u) {
    add(EventKind::backward_begin, u).waits_for_inputs = true;
    if (kept(u) > 0) {
      add(EventKind::kept_read, u);
    }
    for (UnitId child = num_units() - 1; child > u; --child) {
      if (units[child].parent == u) {
        backward(child);
      }
    }
    for (int i = 0; i < num_grads[u]; ++i) {
      add(EventKind::wgrad_done, u);
    }
    if (kept(u) > 0) {
      add(EventKind::kept_done, u);
    }
    add(EventKind::inputs_done, u);
  }

  ScheduleEvent& add(EventKind kind, UnitId u) {
    events.push_back({.kind = kind, .unit = u, .call = u, .task = kTask});
    return events.back();
  }
  UnitId num_units() const { return static_cast<UnitId>(units.size()); }
  std::int64_t kept(UnitId u) const {
    return kept_nbytes.empty() ? 0 : kept_nbytes[u];
  }

  const std::vector<UnitSpec>& units;
  const std::vector<int>& num_grads;
  const std::vector<std::int64_t>& kept_nbytes;
  std::vector<ScheduleEvent> events;
};

}  // namespace

std::vector<ScheduleEvent> plain_step_events(
    const std::vector<UnitSpec>& units,
    const std::vector<int>& num_grads,
    const std::vector<std::int64_t>& kept_nbytes) {
  PlainStep step{
      .units = units,
      .num_grads = num_grads,
      .kept_nbytes = kept_nbytes,
      .events = {}};
  for (UnitId u = 0; u < step.num_units(); ++u) {
    if (units[u].parent == kNoUnit) {
      step.forward(u);
    }
  }
  ScheduleEvent begin{.kind = EventKind::task_begin, .task = kTask};
  for (UnitId u = 0; u < step.num_units(); ++u) {
    begin.calls.emplace_back(u, 1);
    if (num_grads[u] > 0) {
      begin.expected.emplace_back(u, num_grads[u]);
    }
  }
  step.events.push_back(begin);
  for (UnitId u = step.num_units() - 1; u >= 0; --u) {
    if (units[u].parent == kNoUnit) {
      step.backward(u);
    }
  }
  step.events.push_back(
      {.kind = EventKind::task_end, .task = kTask, .outermost = true});
  return std::move(step.events);
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
