#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace flatshard {

/// The defaults are the same as in torch.optim.Muon.
struct NewtonSchulzOptions {
  std::array<double, 3> coefficients = {3.4445, -4.7750, 2.0315};
  std::int64_t steps = 5;
  double eps = 1e-7;  ///< lower limit of the norm that divides a matrix

  /// @throws Error{config} when a value is out of range.
  void validate() const;
};

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
