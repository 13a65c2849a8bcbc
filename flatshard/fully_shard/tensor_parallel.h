#pragma once

#include "flatshard/group/parameter_placement.h"
#include "flatshard/mesh/mesh.h"

#include <torch/nn/module.h>

#include <functional>
#include <string>

namespace flatshard {

/// Returns FullyShardOptions::placement_of for a module whose layers are cut
/// along an axis of the mesh (nn::LinearOptions::ranks and its like).
///
/// A parameter that is cut is sharded over the other axes, and its gradient is
/// the mean over them. A parameter that is whole on each rank is sharded over
/// all axes. Since each rank of `axis` sees other tokens, its gradient is the
/// sum over `axis` and the mean over the other axes, by the group's own
/// reduction.
///
/// @param root  as it is given to fully_shard.
/// @param mesh  the model's; needs an axis besides `axis`.
/// @throws Error{config, usage} for a mesh without these axes.
std::function<ParameterPlacement(const std::string& name)> placement_of_parts(
    torch::nn::Module& root,
    const Mesh& mesh,
    const std::string& axis = "tp");

}  // namespace flatshard
