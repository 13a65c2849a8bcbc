#include "flatshard/unit/unit_contents.h"

#include "flatshard/core/error.h"

#include <algorithm>
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
    p.storage.set_name(p.name);
    groups[p.group]->set_names(p.index, names[i]);
  }
  for (const auto& group : groups) {
    group->set_name("unit " + unit);
  }
}

UnitContents make_unit_contents(
    std::vector<UnitMember> members,
    const std::shared_ptr<Mesh>& mesh,
    const ParamGroupOptions& common,
    const Initializer& initializer) {
  struct Kind {
    bool trainable;
    Precision precision;
    bool whole;
    bool operator==(const Kind&) const = default;
  };
  const auto kind_of = [](const UnitMember& m) {
    return Kind{m.tensor.requires_grad(), m.precision, m.whole};
  };
  std::vector<Kind> kinds;
  for (const UnitMember& m : members) {
    FLATSHARD_CHECK(
        !m.tensor.requires_grad() ||
            (at::isFloatingType(m.tensor.scalar_type()) &&
             m.tensor.element_size() > 1),
        usage,
        "expected trainable parameter {} to be float64, float32, bfloat16 or "
        "float16, got {}; freeze it, register it as a buffer or ignore it",
        m.parameter.names.front(),
        c10::toString(m.tensor.scalar_type()));
    const Kind kind = kind_of(m);
    if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) {
      kinds.push_back(kind);
    }
  }
  std::stable_partition(kinds.begin(), kinds.end(), [](const Kind& kind) {
    return kind.trainable;
  });
  UnitContents contents;
  for (const Kind& kind : kinds) {
    std::vector<GroupParameter> parameters;
    for (UnitMember& m : members) {
      if (kind == kind_of(m)) {
        contents.parameters.push_back(
            {.name = m.parameter.names.front(),
             .tensor = m.tensor,
             .group = contents.groups.size(),
             .index = static_cast<std::int64_t>(parameters.size())});
        parameters.push_back(std::move(m.parameter));
      }
    }
    ParamGroupOptions options = common;
    options.trainable = kind.trainable;
    options.precision = kind.precision;
    if (kind.whole) {
      options.strategy = Strategy::named("no_shard", mesh->num_axes());
    }
    contents.groups.push_back(std::make_unique<ParamGroup>(
        std::move(parameters),
        mesh,
        std::move(options),
        initializer));
  }
  // Only now, when the values are in the groups' own memory.
  for (UnitParameter& p : contents.parameters) {
    p.storage = ParameterStorage(
        p.tensor,
        p.name,
        contents.groups[p.group]->options().precision.compute,
        mesh->device());
  }
  return contents;
}

}  // namespace flatshard
