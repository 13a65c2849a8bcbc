#include "flatshard/group/group_parameter.h"

#include "flatshard/core/error.h"

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

ParameterPlacement ParameterPlacement::along(
    const Mesh& mesh,
    const std::string& axis,
    std::int64_t whole) {
  const std::int64_t parts = mesh.axis(mesh.axis_index(axis)).size;
  FLATSHARD_CHECK(
      whole % parts == 0,
      config,
      "{} slices of a parameter do not divide by axis '{}' of mesh {}",
      whole,
      axis,
      mesh.to_string());
  std::vector<std::string> others;
  for (const std::string& name : mesh.axis_names()) {
    if (name != axis) {
      others.push_back(name);
    }
  }
  FLATSHARD_CHECK(
      !others.empty(),
      config,
      "mesh {} has no axis beside '{}' for what lies along it; add one of one "
      "rank",
      mesh.to_string(),
      axis);
  return {
      .mesh = mesh.sub_mesh(others),
      .grad_divisor = static_cast<double>(parts),
      .slice = TensorSlice{
          .begin = mesh.coordinate(axis) * (whole / parts),
          .whole = whole}};
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
