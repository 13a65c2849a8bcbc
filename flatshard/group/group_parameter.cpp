#include "flatshard/group/group_parameter.h"

namespace flatshard {

std::vector<std::int64_t> GroupParameter::whole_shape() const {
  std::vector<std::int64_t> whole = shape;
  if (placement.slice) {
    whole.front() = placement.slice->whole;
  }
  return whole;
}

std::int64_t GroupParameter::first_element() const {
  if (!placement.slice) {
    return 0;
  }
  std::int64_t numel = placement.slice->begin;
  for (std::size_t d = 1; d < shape.size(); ++d) {
    numel *= shape[d];
  }
  return numel;
}

ParameterPlacement ParameterPlacement::or_else(
    const ParameterPlacement& rest) const {
  ParameterPlacement merged = *this;
  const bool same_axes = !mesh || (rest.mesh && mesh->same_as(*rest.mesh));
  if (!strategy && same_axes) {
    merged.strategy = rest.strategy;
  }
  if (!mesh) {
    merged.mesh = rest.mesh;
  }
  if (!granularity) {
    merged.granularity = rest.granularity;
  }
  if (!grad_divisor) {
    merged.grad_divisor = rest.grad_divisor;
  }
  if (!slice) {
    merged.slice = rest.slice;
  }
  return merged;
}

}  // namespace flatshard
