#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/optim/parameter_values.h"

#include <cstdint>
#include <vector>

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

/// `count` matmuls of [m, k] with [k, n].
struct MatmulBatch {
  std::int64_t count = 1;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
};

/// The matmuls of one iteration of newton_schulz, and its memory.
struct NewtonSchulzWork {
  std::vector<MatmulBatch> matmuls;
  std::int64_t copied_nbytes = 0;   ///< read and written between the matmuls
  std::int64_t scratch_nbytes = 0;  ///< in addition to the matrices
};

/// Returns the work for `count` bfloat16 matrices on CUDA.
NewtonSchulzWork
newton_schulz_work(std::int64_t count, std::int64_t rows, std::int64_t columns);

}  // namespace flatshard
