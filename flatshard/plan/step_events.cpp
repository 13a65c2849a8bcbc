#include "flatshard/plan/step_events.h"

#include <algorithm>

namespace flatshard::plan {
namespace {

/// Inserts events for reads on request of a position, before its kernels.
void insert_reads(
    const std::vector<UnitSpec>& specs,
    std::vector<ScheduleEvent>& events) {
  const auto end =
      std::find_if(events.rbegin(), events.rend(), [](const auto& event) {
        return comes_before_kernels(event.kind);
      });
  std::vector<ScheduleEvent> reads;
  for (auto event = end; event != events.rend(); ++event) {
    const UnitSpec& spec = specs[event->unit == kNoUnit ? 0 : event->unit];
    const bool backward = event->kind == EventKind::backward_begin;
    if (event->unit == kNoUnit || spec.on_request.empty() ||
        (!backward && event->kind != EventKind::forward_begin &&
         event->kind != EventKind::recompute_begin)) {
      continue;
    }
    const PlaneSet asked =
        spec.on_request &
        spec.reads(backward ? Phase::backward : Phase::forward);
    asked.for_each([&](PlaneId plane) {
      const int parts = spec.num_parts(plane);
      for (PartId part = parts > 0 ? 0 : kWhole; part < std::max(parts, 0);
           ++part) {
        reads.push_back(
            {.kind = EventKind::read,
             .unit = event->unit,
             .plane = plane,
             .part = part});
      }
    });
  }
  events.insert(end.base(), reads.begin(), reads.end());
}

}  // namespace

bool comes_before_kernels(EventKind kind) {
  switch (kind) {
    case EventKind::forward_begin:
    case EventKind::recompute_begin:
    case EventKind::backward_begin:
    case EventKind::task_begin:
    case EventKind::microbatch:
    case EventKind::read:
    case EventKind::kept_read:
      return true;
    default:
      return false;
  }
}

std::vector<std::vector<ScheduleEvent>> step_events(
    const std::vector<PlanStep>& plan,
    const Job& job,
    const std::vector<UnitSpec>& specs) {
  auto events = plan_events_by_step(plan, job.plan_units, job.overlap);
  for (std::vector<ScheduleEvent>& of_position : events) {
    insert_reads(specs, of_position);
  }
  return events;
}

}  // namespace flatshard::plan
