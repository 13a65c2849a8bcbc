#pragma once

#include "flatshard/nn/wgrad.h"

namespace flatshard::nn {

// The matrix products that layers with a weight [out, in] have in common.

/// @throws Error{usage} when x is not [..., in] or has another dtype, or when
/// the weight has no memory.
void check_linear_input(const at::Tensor& x, const at::Tensor& weight);

/// x W^T (+ bias) (+ residual), added inside the product.
///
/// @param rows      [rows, in]
/// @param bias      [out] or undefined
/// @param residual  [rows, out] or undefined
/// @return          [rows, out]
at::Tensor matmul_forward(
    const at::Tensor& rows,
    const at::Tensor& weight,
    const at::Tensor& bias = {},
    const at::Tensor& residual = {});

/// dx += g W. An undefined dx is set. Differentiable when gradient mode is on.
///
/// @param g  [rows, out]
void add_input_gradient(
    at::Tensor& dx,
    const at::Tensor& g,
    const at::Tensor& weight);

/// Hands g^T x to the sink of `context`; see deliver_wgrad.
///
/// @param g     [rows, out]
/// @param rows  [rows, in]
at::Tensor deliver_matmul_wgrad(
    const ModuleContextPtr& context,
    const at::Tensor& weight,
    const at::Tensor& g,
    const at::Tensor& rows);

}  // namespace flatshard::nn
