#include "flatshard/group/group_parameter.h"

#include "flatshard/core/error.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace flatshard {

ParameterPlacement ParameterPlacement::cut_over(
    const Mesh& mesh,
    const std::vector<std::string>& axes,
    TensorSlice slice) {
  std::vector<std::string> others = mesh.axis_names();
  std::erase_if(others, [&](const std::string& name) {
    return std::find(axes.begin(), axes.end(), name) != axes.end();
  });
  FLATSHARD_CHECK(
      !others.empty(),
      config,
      "mesh {} has only the axis '{}', along which the parameter is split; add "
      "an axis of one rank",
      mesh.to_string(),
      fmt::join(axes, "', '"));
  return {.mesh = mesh.sub_mesh(others), .slice = std::move(slice)};
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
  const std::int64_t held = whole / parts;
  const std::int64_t begin = mesh.coordinate(axis) * held;
  ParameterPlacement placement = cut_over(
      mesh,
      {axis},
      TensorSlice().take(0, whole, {{begin, begin + held}}));
  placement.grad_divisor = static_cast<double>(parts);
  return placement;
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
