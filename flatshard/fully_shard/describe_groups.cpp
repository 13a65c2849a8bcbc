#include "flatshard/fully_shard/describe_groups.h"

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

GroupShape GroupDescription::shape() const {
  return shape_of(
      {.name = spec.name,
       .strategy = spec.strategy,
       .mesh = spec.mesh,
       .model_mesh = spec.model_mesh ? spec.model_mesh : spec.mesh,
       .trainable = spec.trainable,
       .options = options,
       .parameters = &spec.parameters});
}

std::vector<GroupDescription> describe_groups(
    GroupSpec unit,
    const ParamGroupOptions& options) {
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
  std::vector<GroupDescription> groups;
  for (const Kind& kind : kinds) {
    GroupDescription& group = groups.emplace_back();
    group.spec = {
        .name = unit.name,
        .mesh = kind.mesh,
        .strategy = kind.strategy,
        .model_mesh = unit.mesh,
        .trainable = kind.trainable,
        .peers_read = unit.peers_read};
    for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
      if (kind == kinds_of[i]) {
        group.spec.parameters.push_back(std::move(unit.parameters[i]));
      }
    }
    group.options = options;
    group.options.precision = kind.precision;
    group.options.grad_divisor = kind.grad_divisor;
    group.options.float8 = kind.float8;
    group.options.has_weights = kind.has_weights;
  }
  return groups;
}

}  // namespace flatshard
