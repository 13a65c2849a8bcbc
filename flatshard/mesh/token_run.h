#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "flatshard/mesh/mesh.h"

namespace flatshard {

/// The part that a rank has of the tokens that its group reads: one of `ranks`
/// equal runs of the flattened [batch, seq].
struct TokenRun {
  std::int64_t rank = 0;
  std::int64_t ranks = 1;

  template <class T>
  std::span<T> of(std::span<T> all) const {
    const std::size_t n = all.size() / static_cast<std::size_t>(ranks);
    return all.subspan(static_cast<std::size_t>(rank) * n, n);
  }
};

/// Returns the run of this rank: its place along the axes of sequences
/// (AxisRole).
inline TokenRun token_run(const Mesh& mesh) {
  std::vector<int> axes;
  for (int axis = 0; axis < mesh.num_axes(); ++axis) {
    if (mesh.axis(axis).role == AxisRole::sequence) {
      axes.push_back(axis);
    }
  }
  return {.rank = mesh.group_index(axes), .ranks = mesh.group_size(axes)};
}

}  // namespace flatshard
