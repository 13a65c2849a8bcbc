#pragma once

#include "flatshard/moe/grouped_linear.h"

namespace flatshard::nn {

// The biases of grouped layers, without autograd. Rows r belong to expert e,
// and rows after the last end to none: they are not used, and may be
// overwritten.

/// y[r] += factors[r] * bias[e].
/// @param factors  float32 [rows], or undefined: 1
void add_expert_biases(
    const at::Tensor& y,
    const at::Tensor& bias,
    const at::Tensor& factors,
    const Groups& groups);

/// dots[r] += the dot product of g[r] and bias[e], in float32.
void add_expert_bias_dots(
    const at::Tensor& dots,
    const at::Tensor& bias,
    const at::Tensor& g,
    const Groups& groups);

/// Delivers grad[e] = the sum of factors[r] * g[r] as a matmul, so it does not
/// need the number of rows on the host.
at::Tensor deliver_bias_sums(
    const ModuleContextPtr& context,
    const at::Tensor& bias,
    const at::Tensor& g,
    const at::Tensor& factors,
    const Groups& groups);

}  // namespace flatshard::nn
