#include "flatshard/schedule/prefetch.h"

#include <algorithm>
#include <iterator>

namespace flatshard {

std::vector<UnitId> first_gathered(
    std::span<const Action> actions,
    int prefetch) {
  std::vector<UnitId> first;
  for (const Action& action : actions) {
    if (action.kind == ActionKind::gather && std::ssize(first) <= prefetch &&
        std::ranges::find(first, action.unit) == first.end()) {
      first.push_back(action.unit);
    }
  }
  return first;
}

ScheduleEvent prefetch_event(UnitId unit) {
  return {.kind = EventKind::unshard, .unit = unit, .awaits = false};
}

}  // namespace flatshard
