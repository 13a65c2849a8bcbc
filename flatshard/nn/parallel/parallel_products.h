#pragma once

#include "flatshard/nn/parallel/tensor_parallel.h"

#include <torch/csrc/autograd/custom_function.h>

namespace flatshard::nn {

// Matmuls of the tokens of all ranks, without a graph. Where the ranks' parts
// are sent one by one (TensorParallel::start_gather_of_parts), the matmul of a
// part runs while others are in flight.

struct GatheredProduct {
  at::Tensor rows;     ///< [size * n, in], of all ranks
  at::Tensor product;  ///< [size * n, out]
};

/// All-gathers rows and multiplies them, starting with this rank's rows.
///
/// @param part    [n, in] contiguous
/// @param matrix  [in, out]
/// @param bias    [out] or undefined
GatheredProduct gather_and_multiply(
    TensorParallel& ranks,
    const at::Tensor& part,
    const at::Tensor& matrix,
    const at::Tensor& bias = {});

/// Multiplies, sums the results over the ranks and keeps this rank's rows.
/// Their matmul runs last. The sum is the same as with reduce_scatter.
///
/// @param rows    [size * n, in]
/// @param matrix  [in, out]
/// @return        [n, out]
at::Tensor multiply_and_scatter(
    TensorParallel& ranks,
    const at::Tensor& rows,
    const at::Tensor& matrix);

/// Keeps the ranks of a layer in a node; null stays null.
void save_ranks(
    torch::autograd::AutogradContext* ctx,
    const TensorParallelPtr& ranks);
/// @throws Error{usage} for ranks in a backward with create_graph.
TensorParallelPtr saved_ranks(torch::autograd::AutogradContext* ctx);

}  // namespace flatshard::nn
