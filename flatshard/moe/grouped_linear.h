#pragma once

#include "flatshard/moe/permute.h"
#include "flatshard/nn/module.h"

#include <cstdint>

namespace flatshard::nn {

// Products of groups of rows, each group with a separate weight. Rows after the
// last end are neither read nor written: in results they are uninitialized.
//
// bfloat16 on GPUs of sm_9x and sm_10x: torch's grouped product, for fewer than
// 1024 groups and sizes that are multiples of 8 elements. Nothing blocks the
// host. Elsewhere, and with several groups for each expert, there is one
// product after the other. The host waits for `ends` then, unless they are on
// the CPU.

/// Which rows are whose.
struct Groups {
  at::Tensor ends;  ///< int32 [experts * per_expert]; see ExchangePlan::ends
  std::int64_t per_expert = 1;
};

/// y[r] = x[r] W[e]^T for the rows r of expert e.
///
/// @param x       [rows, in]
/// @param weight  [experts, out, in], x's dtype
/// @param context  of the module that owns the weight; its WgradSink gets the
///   gradient, [experts, out, in], zeros for experts without rows. May be null.
/// @return        [rows, out]
at::Tensor grouped_linear(
    const at::Tensor& x,
    const at::Tensor& weight,
    const Groups& groups,
    const ModuleContextPtr& context = {});

/// grouped_linear(permute_rows(x, permutation), ...), which keeps x for the
/// backward and not the rows, of which there are slots times as many.
///
/// @param x  [tokens, in]
/// @return   [tokens * slots, out]
at::Tensor permute_grouped_linear(
    const at::Tensor& x,
    const Permutation& permutation,
    const at::Tensor& weight,
    const Groups& groups,
    const ModuleContextPtr& context = {});

/// y[r] = (silu(gate[r]) * up[r] * row_weights[r]) W[e]^T, which keeps neither
/// its result nor the product of gate and up: the weight of a row is multiplied
/// in front of the linear layer, which gives the same and needs no [rows, out]
/// in the backward.
///
/// @param gate_up      [rows, 2 * in], gate first
/// @param row_weights  float32 [rows]
/// @param weight       [experts, out, in]
/// @return             [rows, out]
at::Tensor grouped_swiglu_linear(
    const at::Tensor& gate_up,
    const at::Tensor& row_weights,
    const at::Tensor& weight,
    const Groups& groups,
    const ModuleContextPtr& context = {});

}  // namespace flatshard::nn
