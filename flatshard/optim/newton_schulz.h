#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/optim/newton_schulz_options.h"

namespace flatshard {

/// Returns a matrix of the same singular vectors with singular values near 1,
/// for each matrix, by a quintic Newton-Schulz iteration. Uses the operations
/// of torch.optim.Muon in the same order, so that one matrix has the same
/// result bitwise on a CPU. On CUDA, the two symmetric matmuls of a large
/// bfloat16 matrix compute what is on and below the diagonal. Queues on the
/// current stream.
///
/// @param matrices  [rows, columns], or [n, rows, columns] for n matrices that
///   are multiplied as a batch. bfloat16 as in torch, or float32. Overwritten.
/// @return  the same sizes and dtype, possibly transposed in memory.
/// Source: https://kellerjordan.github.io/posts/muon/
at::Tensor newton_schulz(
    at::Tensor matrices,
    const NewtonSchulzOptions& options);

}  // namespace flatshard
