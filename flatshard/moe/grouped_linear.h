#pragma once

#include "flatshard/moe/expert_layout.h"
#include "flatshard/moe/permute.h"
#include "flatshard/nn/module.h"
#include "flatshard/ops/gate_activation.h"

#include <cstdint>
#include <utility>

namespace flatshard::nn {

// Grouped matmuls: each group of rows has a separate weight. Rows after the
// last end are neither read nor written: in results they are uninitialized.
//
// bfloat16 on GPUs of sm_9x and sm_10x, up to 1023 groups: torch's kernel for
// sizes that are multiples of 8, on sm_90 our own for multiples of 256. Nothing
// blocks the host. Otherwise, and with several groups for each expert, one
// matmul runs after the other. The host then waits for `ends`, unless they are
// on the CPU.

/// Assigns rows to experts.
struct Groups {
  at::Tensor ends;  ///< int32 [experts * per_expert]; see ExchangePlan::ends
  std::int64_t per_expert = 1;
};

/// One linear layer of each expert.
struct GroupedLayer {
  GroupedLayer(  // NOLINT(google-explicit-constructor): a weight is one
      at::Tensor weight,
      at::Tensor bias = {},
      ExpertLayout layout = ExpertLayout::stacked)
      : weight(std::move(weight)), bias(std::move(bias)), layout(layout) {}

  std::int64_t out_features() const { return weight.size(is_in_out() ? 2 : 1); }
  std::int64_t in_features() const { return weight.size(is_in_out() ? 1 : 2); }
  bool is_in_out() const { return layout == ExpertLayout::interleaved; }

  at::Tensor weight;  ///< [experts, out, in]; interleaved: [experts, in, out]
  at::Tensor bias;    ///< [experts, out], or undefined
  ExpertLayout layout;
};

/// y[r] = x[r] W[e]^T + b[e] for the rows r of expert e.
///
/// @param x       [rows, in]
/// @param layer   of x's dtype
/// @param context  of the module that owns the weight; its WgradSink gets the
///   gradients, zeros for experts without rows. May be null.
/// @return        [rows, out]
at::Tensor grouped_linear(
    const at::Tensor& x,
    const GroupedLayer& layer,
    const Groups& groups,
    const ModuleContextPtr& context = {});

/// grouped_linear(permute_rows(x, permutation), ...), except that it saves x
/// for the backward and not the rows (slots times as many).
///
/// @param x  [tokens, in]
/// @return   [tokens * slots, out]
at::Tensor permute_grouped_linear(
    const at::Tensor& x,
    const Permutation& permutation,
    const GroupedLayer& layer,
    const Groups& groups,
    const ModuleContextPtr& context = {});

/// y[r] = (gated(gate[r], up[r]) W[e]^T + b[e]) * row_weights[r]. Saves neither
/// its result nor gate times up: the weight of a row is applied before the
/// linear layer. The result is the same, and the backward needs no tensor of
/// [rows, out].
///
/// @param activation   on CUDA one pass each way, but plain operations for
///   gelu_tanh
/// @param gate_up      [rows, 2 * in], gate first; interleaved: in turn
/// @param row_weights  float32 [rows]
/// @param is_unread    as for gated_linear
/// @return             [rows, out]
at::Tensor grouped_gated_linear(
    GateActivation activation,
    const at::Tensor& gate_up,
    const at::Tensor& row_weights,
    const GroupedLayer& layer,
    const Groups& groups,
    const ModuleContextPtr& context = {},
    bool is_unread = false);

}  // namespace flatshard::nn
