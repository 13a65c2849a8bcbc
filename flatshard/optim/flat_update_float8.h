#pragma once

#include "flatshard/group/plane_writer.h"

namespace flatshard {

/// @throws Error{internal} unless the outputs belong to a shard like `main`.
void check_float8_outputs(const PlaneWriter& outputs, const at::Tensor& main);

/// Writes the same as CUDA's kernel in its pass, for main weights on the CPU.
void write_float8_outputs(const PlaneWriter& outputs, const at::Tensor& main);

}  // namespace flatshard
