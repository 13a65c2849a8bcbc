#pragma once

#include "flatshard/group/float8_outputs.h"

namespace flatshard {

/// @throws Error{internal} unless the outputs are those of a shard like `main`.
void check_float8_outputs(const Float8Outputs& outputs, const at::Tensor& main);

/// What CUDA's kernel writes in its pass, of main weights on the CPU.
void write_float8_outputs(const Float8Outputs& outputs, const at::Tensor& main);

}  // namespace flatshard
