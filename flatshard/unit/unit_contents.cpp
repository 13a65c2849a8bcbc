#include "flatshard/unit/unit_contents.h"

#include "flatshard/core/error.h"

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

/// What the parameters of one group have in common.
struct Kind {
  bool trainable;
  Precision precision;
  std::shared_ptr<Mesh> mesh;
  Strategy strategy;
  double grad_divisor;
  bool is_slice;

  bool operator==(const Kind& other) const {
    return trainable == other.trainable && precision == other.precision &&
           mesh->same_as(*other.mesh) && strategy == other.strategy &&
           grad_divisor == other.grad_divisor && is_slice == other.is_slice;
  }
};

Kind kind_of(
    const UnitMember& m,
    const std::shared_ptr<Mesh>& mesh,
    const ParamGroupOptions& common) {
  return {
      .trainable = m.tensor.requires_grad(),
      .precision = m.precision,
      .mesh = m.mesh ? m.mesh : mesh,
      .strategy = m.whole ? Strategy::named("zero0", mesh->num_axes())
                          : m.strategy.value_or(common.strategy),
      .grad_divisor = m.grad_divisor.value_or(common.grad_divisor),
      .is_slice = m.parameter.slice.has_value()};
}

}  // namespace

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
    std::vector<UnitMember> members,
    const std::shared_ptr<Mesh>& mesh,
    const ParamGroupOptions& common,
    const Initializer& initializer) {
  std::vector<Kind> kinds_of;  // of each member
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
    kinds_of.push_back(kind_of(m, mesh, common));
    const Kind& kind = kinds_of.back();
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
    for (std::size_t i = 0; i < members.size(); ++i) {
      UnitMember& m = members[i];
      if (kind == kinds_of[i]) {
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
    options.strategy = kind.strategy;
    options.grad_divisor = kind.grad_divisor;
    options.model_mesh = mesh;
    contents.groups.push_back(std::make_unique<ParamGroup>(
        std::move(parameters),
        kind.mesh,
        std::move(options),
        initializer));
  }
  // Only now, when the values are in the groups' own memory.
  for (UnitParameter& p : contents.parameters) {
    p.storage = ParameterStorage(
        p.tensor,
        common.name,
        p.name,
        contents.groups[p.group]->options().precision.compute,
        mesh->device());
  }
  return contents;
}

}  // namespace flatshard
