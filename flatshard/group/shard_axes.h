#pragma once

#include "flatshard/layout/placement.h"
#include "flatshard/mesh/mesh.h"

#include <vector>

namespace flatshard {

class ParamGroup;

/// Returns the axes of ParamGroup::model_mesh along which ranks store other
/// elements of the main weights, ascending.
std::vector<int> shard_axes(const ParamGroup& group);

/// Returns the same of a group that has no memory yet.
/// @param mesh       of the group: some axes of model_mesh.
/// @param main       the placements of main weights along them.
/// @param is_sliced  its parameters are slices: larger tensors are split along
///   the other axes.
std::vector<int> shard_axes(
    const Mesh& mesh,
    const Mesh& model_mesh,
    const Placements& main,
    bool is_sliced);

}  // namespace flatshard
