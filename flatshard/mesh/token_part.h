#pragma once

#include "flatshard/core/token_parts.h"
#include "flatshard/mesh/mesh.h"

#include <vector>

namespace flatshard {

/// Returns the part of this rank by its places along the axes of sequences
/// (AxisRole). The ranks of the last one are on one host, and outer ones are
/// over hosts.
inline TokenPart token_part(const Mesh& mesh) {
  std::vector<int> axes;
  for (int axis = 0; axis < mesh.num_axes(); ++axis) {
    if (mesh.axis(axis).role == AxisRole::sequence) {
      axes.push_back(axis);
    }
  }
  if (axes.empty()) {
    return {};
  }
  const std::vector<int> inner{axes.back()};
  axes.pop_back();
  return {
      .rank = mesh.group_index(inner),
      .ranks = mesh.group_size(inner),
      .host = mesh.group_index(axes),
      .hosts = mesh.group_size(axes)};
}

}  // namespace flatshard
