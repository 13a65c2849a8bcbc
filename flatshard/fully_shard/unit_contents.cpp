#include "flatshard/fully_shard/unit_contents.h"

#include "flatshard/core/error.h"

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

/// The properties that all parameters of one group share.
struct Kind {
  bool trainable;
  std::int64_t apart;
  bool has_weights;
  Precision precision;
  std::shared_ptr<Mesh> mesh;
  Strategy strategy;
  double grad_divisor;
  bool is_slice;
  std::optional<Float8Format> float8;

  bool operator==(const Kind& other) const {
    return trainable == other.trainable && apart == other.apart &&
           has_weights == other.has_weights && precision == other.precision &&
           mesh->same_as(*other.mesh) && strategy == other.strategy &&
           grad_divisor == other.grad_divisor && is_slice == other.is_slice &&
           float8 == other.float8;
  }
};

Kind kind_of(
    const GroupParameter& p,
    const GroupSpec& unit,
    const ParamGroupOptions& options) {
  return {
      .trainable = p.trainable.value_or(p.tensor.requires_grad()),
      .apart = p.apart,
      .has_weights = p.has_weights,
      .precision = p.precision.value_or(options.precision),
      .mesh = p.placement.mesh ? p.placement.mesh : unit.mesh,
      .strategy = p.placement.strategy.value_or(unit.strategy),
      .grad_divisor = p.placement.grad_divisor.value_or(options.grad_divisor),
      .is_slice = p.placement.slice.has_value(),
      .float8 = p.float8};
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
    GroupSpec unit,
    const ParamGroupOptions& options,
    const Initializer& initializer) {
  std::vector<Kind> kinds_of;  // of each parameter
  std::vector<Kind> kinds;
  for (const GroupParameter& p : unit.parameters) {
    FLATSHARD_CHECK(
        !p.tensor.requires_grad() ||
            (at::isFloatingType(p.tensor.scalar_type()) &&
             p.tensor.element_size() > 1),
        usage,
        "expected trainable parameter {} to be float64, float32, bfloat16 or "
        "float16, got {}; freeze it, register it as a buffer or ignore it",
        p.names.front(),
        c10::toString(p.tensor.scalar_type()));
    kinds_of.push_back(kind_of(p, unit, options));
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
    GroupSpec spec{
        .name = unit.name,
        .mesh = kind.mesh,
        .strategy = kind.strategy,
        .model_mesh = unit.mesh,
        .trainable = kind.trainable,
        .peers_read = unit.peers_read};
    for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
      GroupParameter& p = unit.parameters[i];
      if (kind == kinds_of[i]) {
        contents.parameters.push_back(
            {.name = p.names.front(),
             .tensor = std::move(p.tensor),
             .group = contents.groups.size(),
             .index = static_cast<std::int64_t>(spec.parameters.size())});
        spec.parameters.push_back(std::move(p));
      }
    }
    ParamGroupOptions own = options;
    own.precision = kind.precision;
    own.grad_divisor = kind.grad_divisor;
    own.float8 = kind.float8;
    own.has_weights = kind.has_weights;
    contents.groups.push_back(std::make_unique<ParamGroup>(
        std::move(spec),
        std::move(own),
        initializer));
  }
  // Only now, when the values are in the groups' own memory.
  for (UnitParameter& p : contents.parameters) {
    p.storage = ParameterStorage(
        p.tensor,
        unit.name,
        p.name,
        contents.groups[p.group]->options().precision.compute,
        unit.mesh->device());
    if (!contents.groups[p.group]->weights().has(kComputePlane)) {
      p.storage.refuse_as_float8();
    }
  }
  return contents;
}

}  // namespace flatshard
