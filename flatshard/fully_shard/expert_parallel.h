#pragma once

#include "flatshard/group/parameter_placement.h"
#include "flatshard/layout/tensor_slice.h"
#include "flatshard/mesh/mesh.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard {

/// Which part of all experts a rank has: the `rank`-th of `ranks` equal parts
/// of them, and the `width_rank`-th of `width_ranks` equal parts of the width
/// of each.
struct ExpertPart {
  std::int64_t rank = 0;
  std::int64_t ranks = 1;
  std::int64_t width_rank = 0;
  std::int64_t width_ranks = 1;
};

/// Returns a rank's part of the parameter of all experts.
/// @param name  ends with "gate_up_proj" for [experts, 2 * width, dim], gate
///   first, else a parameter [experts, dim, width].
TensorSlice expert_slice(std::string_view name, const ExpertPart& part);

/// Returns the placement of experts' parameters. Each coordinate of `axes` has
/// another slice, and computes the tokens of all ranks along these axes. They
/// are sharded over the other axes, and their gradient is the mean over all
/// ranks that read different tokens (Mesh::token_mesh).
///
/// @param mesh   of the model; needs an axis in addition to `axes`.
/// @param slice  of this rank, see expert_slice
/// @throws Error{config, usage} for a mesh without these axes.
ParameterPlacement expert_placement(
    const Mesh& mesh,
    const std::vector<std::string>& axes,
    TensorSlice slice);

}  // namespace flatshard
