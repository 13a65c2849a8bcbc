#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/moe/gate.h"
#include "flatshard/moe/router_args.h"

#include <cstdint>
#include <tuple>

/// CUDA kernels of Mixture of Experts for tensors; see cuda_ops.h. Built twice:
/// cuda_moe.cpp with CUDA, no_cuda_moe.cpp without (its functions throw).
namespace flatshard::nn::cuda {

/// Pointers are of the current device.
void router_forward(const RouterForward& args);
void router_backward(const RouterBackward& args);

/// int32 [num_experts]: how often each occurs in `experts`, int32; what is not
/// in [0, num_experts) is not counted.
at::Tensor count_experts(const at::Tensor& experts, std::int64_t num_experts);

/// See Permutation: (order [pairs], rows [pairs]).
/// @param experts  int32 [pairs]
/// @param counts   int32 [num_experts]
std::tuple<at::Tensor, at::Tensor> sort_by_expert(
    const at::Tensor& experts,
    const at::Tensor& counts);

/// permute_rows_into, or all rows in `out`: of_rows and staying are undefined.
void permute_rows(
    const at::Tensor& x,
    const at::Tensor& order,
    const at::Tensor& of_rows,
    std::int64_t per_token,
    std::int64_t num_rows,
    const at::Tensor& out,
    const at::Tensor& staying);

/// Computes sum_rows_from, or the sum of rows that are all in `rows`: staying
/// is undefined, and places are Permutation::inverse. Rounds once.
/// @param addend  like out, or undefined.
void sum_rows(
    const at::Tensor& rows,
    const at::Tensor& staying,
    const at::Tensor& places,
    const at::Tensor& addend,
    const at::Tensor& out);

/// See RowPlaces; overwrites of_rows and of_pairs.
void row_places(
    const at::Tensor& order,
    const at::Tensor& runs,
    std::int64_t num_rows,
    at::Tensor& of_rows,
    at::Tensor& of_pairs);

/// Returns whether the two functions below compute this.
bool has_gate_kernel(const Gate& gate, const at::Tensor& gate_up);
/// y[r] = gated(gate, up) * weights[r] of rows of gate_up.
void weighted_gate_forward(
    const Gate& gate,
    const at::Tensor& gate_up,
    const at::Tensor& weights,
    at::Tensor& y);
/// @param product  overwritten by weighted_gate_forward's; may be dy.
void weighted_gate_backward(
    const Gate& gate,
    const at::Tensor& dy,
    const at::Tensor& gate_up,
    const at::Tensor& weights,
    at::Tensor& dgate_up,
    at::Tensor& dweights,
    at::Tensor& product);

/// rows[r] += factors[r] * bias[e] for the rows r of expert e. Rows after the
/// last end are neither read nor written.
/// @param ends     see Groups
/// @param factors  float32 [rows], or undefined: 1
void add_expert_biases(
    const at::Tensor& bias,
    const at::Tensor& ends,
    std::int64_t per_expert,
    const at::Tensor& factors,
    const at::Tensor& rows);
/// dots[r] += the dot product of rows[r] and bias[e], in float32.
void add_expert_bias_dots(
    const at::Tensor& bias,
    const at::Tensor& ends,
    std::int64_t per_expert,
    const at::Tensor& rows,
    const at::Tensor& dots);

/// Returns whether grouped_mm runs on rows like these with weights of [out,
/// in]: bfloat16 on a GPU that has the kernel, aligned to 16 bytes.
bool multiplies_groups(
    const at::Tensor& a,
    const at::Tensor& b,
    std::int64_t out_features,
    std::int64_t in_features);
/// torch's grouped product; 2-D and 3-D operands as torch._grouped_mm has them.
/// @param out  overwritten, except for rows after the last end.
void grouped_mm(
    const at::Tensor& a,
    const at::Tensor& b,
    const at::Tensor& ends,
    at::Tensor& out);

}  // namespace flatshard::nn::cuda
