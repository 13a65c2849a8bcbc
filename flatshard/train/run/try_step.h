#pragma once

#include <memory>
#include <string>
#include <vector>

#include "flatshard/mesh/mesh.h"

namespace flatshard {

/// Returns the steps that show whether training works on a mesh's devices: a
/// tiny model in bfloat16, one with FP8 weights and one with experts.
std::vector<std::string> step_kinds();

/// Trains one of `step_kinds` for a step of AdamW, sharded over the mesh, on
/// the same tokens on all ranks.
/// @return the loss of the first forward, the same on any number of ranks
///   except for rounding.
/// @throws Error if the loss is NaN or the step does not lower it, and whatever
///   the step throws. Collective.
double try_step(const std::shared_ptr<Mesh>& mesh, const std::string& kind);

}  // namespace flatshard
