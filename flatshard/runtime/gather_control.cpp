#include "flatshard/runtime/gather_control.h"

#include "flatshard/runtime/runtime_core.h"
#include "flatshard/schedule/keep_units.h"
#include "flatshard/schedule/prefetch.h"

#include <utility>
#include <vector>

namespace flatshard {

void GatherControl::set_policy(UnitId unit, UnitPolicy policy) {
  const std::lock_guard lock(core_.mutex);
  const UnitPolicy former = core_.step.scheduler.policy(unit);
  if (policy == former) {
    return;
  }
  UnitPolicy gathers = policy;  // as far as slots depend on it
  gathers.sync_gradients = former.sync_gradients;
  gathers.all_reduce = former.all_reduce;
  const bool changes_slots = gathers != former;
  core_.step.scheduler.set_policy(unit, std::move(policy));
  ++core_.num_rule_changes;
  if (changes_slots && !core_.options.slots_on_demand &&
      core_.step.actions.empty() &&
      core_.executor.slots().pool().num_held() == 0) {
    core_.plan_next_step();
  }
}

int GatherControl::keep_gathered(std::int64_t nbytes) {
  const std::lock_guard lock(core_.mutex);
  const auto kept = choose_kept_units(
      core_.step.scheduler.units(),
      core_.step.scheduler.options(),
      nbytes);
  for (const UnitId unit : kept) {
    UnitPolicy policy = core_.step.scheduler.units()[unit].policy;
    policy.reshard_after_forward = false;
    core_.step.scheduler.set_policy(unit, std::move(policy));
  }
  core_.plan_next_step();
  return static_cast<int>(kept.size());
}

void GatherControl::unshard(UnitId unit, bool awaits) {
  const std::lock_guard lock(core_.mutex);
  if (core_.rests()) {
    core_.before_root_forward();
  }
  if (awaits) {
    core_.executor.wait_for_written_weights(*core_.units[unit]);
  }
  core_.feed(
      {.kind = EventKind::unshard,
       .unit = unit,
       .awaits = awaits,
       .by_program = true});
  if (awaits) {
    core_.step.unsharded[unit] = true;
    core_.show(unit);
  }
}

void GatherControl::prefetch_forward() {
  const std::lock_guard lock(core_.mutex);
  if (core_.options.graphs.whole_step) {
    return;  // a graph has its own all-gathers
  }
  const std::vector<UnitId> first =
      first_gathered(core_.step.actions, core_.options.prefetch);
  if (first.empty() || !core_.rests()) {
    return;
  }
  core_.before_root_forward();
  for (const UnitId unit : first) {
    core_.feed(prefetch_event(unit));
  }
}

void GatherControl::reshard(UnitId unit) {
  const std::lock_guard lock(core_.mutex);
  core_.feed({.kind = EventKind::reshard, .unit = unit});
  core_.step.unsharded[unit] = false;
  core_.hide(unit);
}

}  // namespace flatshard
