#pragma once

#include "flatshard/group/param_group.h"

namespace flatshard {

/// Encodes the weights of a frozen group in FP8 and frees the memory of its
/// main weights, for programs that never read them again: neither checkpoints
/// nor exports have the group. Its main weights keep their size and have no
/// memory. Collective over the group's mesh, on the current stream, while no
/// other all-gather runs.
/// @throws Error{usage} for a group that trains, or that stores no FP8 data
///   between all-gathers.
void drop_main_weights(ParamGroup& group);

/// Returns whether the main weights of a group have memory.
bool has_main_weights(const ParamGroup& group);

}  // namespace flatshard
