#pragma once

#include "flatshard/nn/parallel/tensor_parallel.h"

#include <torch/csrc/autograd/custom_function.h>

namespace flatshard::nn {

// Matrix products of the tokens of all ranks, without a graph. Where the ranks'
// parts travel one by one (TensorParallel::start_gather_of_parts), the product
// of a part runs while others travel.

struct GatheredProduct {
  at::Tensor rows;     ///< [size * n, in], of all ranks
  at::Tensor product;  ///< [size * n, out]
};

/// Gathers rows and multiplies them, its own ones first.
///
/// @param part    [n, in] contiguous
/// @param matrix  [in, out]
/// @param bias    [out] or undefined
GatheredProduct gather_and_multiply(
    TensorParallel& ranks,
    const at::Tensor& part,
    const at::Tensor& matrix,
    const at::Tensor& bias = {});

/// Multiplies, sums the products over the ranks and keeps this rank's rows,
/// whose product comes last. The sum is reduce_scatter's.
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
