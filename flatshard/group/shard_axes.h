#pragma once

#include <vector>

namespace flatshard {

class ParamGroup;

/// Returns the axes of ParamGroup::model_mesh along which ranks store other
/// elements of the main weights, ascending.
std::vector<int> shard_axes(const ParamGroup& group);

}  // namespace flatshard
