#pragma once

#include "flatshard/moe/grouped_linear.h"

#include <functional>

namespace flatshard::nn {

// The three matmuls of grouped layers, without autograd.

/// Calls fn(expert, is_first_of_expert, `begin`, end) for each group in order;
/// waits for `ends` if they are on a GPU.
void for_each_group(
    const Groups& groups,
    const std::function<void(
        std::int64_t expert,
        bool first,
        std::int64_t begin,
        std::int64_t end)>& fn);

/// x W[e]^T; [rows, out]. Rows after the last end are uninitialized.
at::Tensor grouped_forward(
    const at::Tensor& x,
    const at::Tensor& weight,
    const Groups& groups);

/// g W[e]; [rows, in]. Rows after the last end are uninitialized.
at::Tensor grouped_input_gradient(
    const at::Tensor& g,
    const at::Tensor& weight,
    const Groups& groups);

/// grad[e] = g_e^T x_e, or added to it, straight into `grad` where its dtype
/// and strides allow.
void grouped_weight_gradient(
    at::Tensor& grad,
    bool accumulate,
    const at::Tensor& g,
    const at::Tensor& x,
    const Groups& groups);

/// Returns whether grouped_weight_gradient of a float32 `grad` like `weight` is
/// one kernel, without a gradient in another dtype before.
bool adds_to_float32(
    const at::Tensor& weight,
    const at::Tensor& g,
    const at::Tensor& x,
    const Groups& groups);

}  // namespace flatshard::nn
