#pragma once

#include "flatshard/moe/gate.h"

#include <ATen/core/Tensor.h>

#include <tuple>

namespace flatshard::nn {

// gated(gate, up) * row_weights[r] of rows of gate_up, without autograd. On
// CUDA one pass each way, but plain operations on parts of the rows for
// gelu_tanh.

/// @param gate_up      [rows, 2 * width]
/// @param row_weights  float32 [rows]
/// @return             [rows, width]
at::Tensor weighted_gate(
    const Gate& gate,
    const at::Tensor& gate_up,
    const at::Tensor& row_weights);

/// @param dy  [rows, width]; overwritten by what weighted_gate returned.
/// @return    the gradients of gate_up and row_weights, and dy
std::tuple<at::Tensor, at::Tensor, at::Tensor> weighted_gate_backward(
    const Gate& gate,
    const at::Tensor& dy,
    const at::Tensor& gate_up,
    const at::Tensor& row_weights);

}  // namespace flatshard::nn
