#include "flatshard/unit/gather_control.h"

#include "flatshard/schedule/keep_units.h"
#include "flatshard/unit/runtime.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace flatshard {

void GatherControl::set_policy(UnitId unit, UnitPolicy policy) {
  const std::lock_guard lock(runtime_.mutex_);
  runtime_.scheduler_.set_policy(unit, std::move(policy));
  ++runtime_.num_rule_changes_;
  if (!runtime_.options_.slots_on_demand && runtime_.step_actions_.empty() &&
      runtime_.executor_.slots().pool().num_held() == 0) {
    runtime_.plan_next_step();
  }
}

int GatherControl::keep_gathered(std::int64_t nbytes) {
  const std::lock_guard lock(runtime_.mutex_);
  const auto kept = choose_kept_units(
      runtime_.scheduler_.units(),
      runtime_.scheduler_.options(),
      nbytes);
  for (const UnitId unit : kept) {
    UnitPolicy policy = runtime_.scheduler_.units()[unit].policy;
    policy.reshard_after_forward = false;
    runtime_.scheduler_.set_policy(unit, std::move(policy));
  }
  runtime_.plan_next_step();
  return static_cast<int>(kept.size());
}

void GatherControl::unshard(UnitId unit, bool awaits) {
  const std::lock_guard lock(runtime_.mutex_);
  if (runtime_.rests()) {
    runtime_.before_root_forward();
  }
  runtime_.executor_.set_by_hand(true);
  const auto done =
      c10::make_scope_exit([&] { runtime_.executor_.set_by_hand(false); });
  runtime_.feed({.kind = EventKind::unshard, .unit = unit, .awaits = awaits});
  if (awaits) {
    runtime_.by_hand_[unit] = true;
    runtime_.reveal(*runtime_.units_[unit]);
  }
}

void GatherControl::prefetch_forward() {
  const std::lock_guard lock(runtime_.mutex_);
  if (runtime_.options_.graphs.whole_step) {
    return;  // a graph gathers everything itself
  }
  std::vector<UnitId> first;
  for (const Action& action : runtime_.step_actions_) {
    if (action.kind == ActionKind::gather &&
        static_cast<int>(first.size()) <= runtime_.options_.prefetch &&
        std::find(first.begin(), first.end(), action.unit) == first.end()) {
      first.push_back(action.unit);
    }
  }
  if (first.empty() || !runtime_.rests()) {
    return;
  }
  runtime_.before_root_forward();
  for (const UnitId unit : first) {
    runtime_.feed({.kind = EventKind::unshard, .unit = unit, .awaits = false});
  }
}

void GatherControl::reshard(UnitId unit) {
  const std::lock_guard lock(runtime_.mutex_);
  runtime_.feed({.kind = EventKind::reshard, .unit = unit});
  runtime_.by_hand_[unit] = false;
  runtime_.hide(*runtime_.units_[unit]);
}

}  // namespace flatshard
