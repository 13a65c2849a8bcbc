#include "flatshard/plan/job.h"

#include "flatshard/schedule/simulate.h"
#include "flatshard/schedule/slot_plan.h"

namespace flatshard::plan {

std::vector<UnitPlan> plan_units(const Job& job) {
  std::vector<UnitPlan> units;
  units.reserve(job.units.size());
  for (const UnitShape& shape : job.units) {
    units.emplace_back(shape);
  }
  return units;
}

std::vector<RoleBytes> memory_of(
    const Job& job,
    const std::vector<UnitPlan>& units) {
  GroupBytes sum;
  std::vector<UnitSpec> specs;
  for (const UnitPlan& unit : units) {
    specs.push_back(unit.spec);
    for (const GroupPlan& group : unit.groups) {
      sum += group.bytes();
    }
  }
  const SlotPlan slots = SlotPlan::build(
      slot_lifetimes(specs, simulate_step(specs, job.scheduler)));
  std::vector<RoleBytes> rows{
      {"main weights", sum.main},
      {"compute weights", sum.compute},
      {"gradients", sum.gradients},
      {"optimizer state", job.state_nbytes},
      {"slot pool", slots.arena_nbytes()}};
  for (const auto& [role, nbytes] : job.other_nbytes) {
    if (nbytes > 0) {
      rows.push_back({role, nbytes});
    }
  }
  return rows;
}

}  // namespace flatshard::plan
