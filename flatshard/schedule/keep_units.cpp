#include "flatshard/schedule/keep_units.h"

#include "flatshard/schedule/simulate.h"
#include "flatshard/schedule/slot_plan.h"

#include <map>
#include <tuple>

namespace flatshard {

std::vector<UnitId> choose_kept_units(
    std::vector<UnitSpec> units,
    SchedulerOptions options,
    std::int64_t nbytes) {
  std::map<std::tuple<UnitId, PlaneId, PartId>, int> num_gathers;
  std::vector<bool> gathered_twice(units.size());
  for (const Action& action : simulate_step(units, options)) {
    if (action.kind == ActionKind::gather &&
        ++num_gathers[{action.unit, action.plane, action.part}] == 2) {
      gathered_twice[action.unit] = true;
    }
  }
  std::vector<UnitId> kept;
  for (UnitId u = static_cast<UnitId>(units.size()) - 1; u >= 0; --u) {
    if (!gathered_twice[u]) {
      continue;
    }
    bool& reshard = units[u].policy.reshard_after_forward;
    reshard = false;
    const auto actions = simulate_step(units, options);
    const SlotPlan plan = SlotPlan::build(slot_lifetimes(units, actions));
    if (plan.arena_nbytes() <= nbytes) {
      kept.push_back(u);
    } else {
      reshard = true;  // a smaller one may still fit
    }
  }
  return kept;
}

}  // namespace flatshard
