#include "flatshard/fully_shard/unit_contents.h"

#include "flatshard/core/error.h"

#include <utility>

namespace flatshard {

void UnitContents::set_names(
    const std::string& unit,
    const std::vector<std::vector<std::string>>& names) {
  FLATSHARD_CHECK(
      names.size() == parameters.size(),
      usage,
      "unit {}: expected names of {} parameters, got {}",
      unit,
      parameters.size(),
      names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    UnitParameter& p = parameters[i];
    p.name = names[i].front();
    p.storage.set_name("unit " + unit, p.name);
    groups[p.group]->set_names(p.index, names[i]);
  }
  for (const auto& group : groups) {
    group->set_name("unit " + unit);
  }
}

UnitContents make_unit_contents(
    const std::string& unit,
    at::Device device,
    std::vector<GroupDescription> groups,
    const Initializer& initializer) {
  UnitContents contents;
  for (GroupDescription& group : groups) {
    std::int64_t index = 0;
    for (GroupParameter& p : group.spec.parameters) {
      contents.parameters.push_back(
          {.name = p.names.front(),
           .tensor = std::move(p.tensor),
           .group = contents.groups.size(),
           .index = index++});
    }
    contents.groups.push_back(std::make_unique<ParamGroup>(
        std::move(group.spec),
        std::move(group.options),
        initializer));
  }
  // Only now, when the values are in the groups' own memory.
  for (UnitParameter& p : contents.parameters) {
    p.storage = ParameterStorage(
        p.tensor,
        unit,
        p.name,
        contents.groups[p.group]->options().precision.compute,
        device);
    if (!contents.groups[p.group]->weights().has(kComputePlane)) {
      p.storage.store_in("FP8");
    }
  }
  return contents;
}

UnitContents make_unit_contents(
    GroupSpec unit,
    const ParamGroupOptions& options,
    const Initializer& initializer) {
  const std::string name = unit.name;
  const at::Device device = unit.mesh->device();
  return make_unit_contents(
      name,
      device,
      describe_groups(std::move(unit), options),
      initializer);
}

}  // namespace flatshard
