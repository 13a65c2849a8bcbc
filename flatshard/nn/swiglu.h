#pragma once

#include "flatshard/nn/linear.h"
#include "flatshard/ops/gate_activation.h"

#include <tuple>

namespace flatshard::nn {

/// silu(gate) * up, elementwise; same shape and dtype. On CUDA one pass each
/// way in float32.
/// Source: Shazeer, arXiv:2002.05202.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// act(gate) * up, elementwise: `swiglu` for silu. The other activations are
/// plain operations.
at::Tensor
gated(GateActivation activation, const at::Tensor& gate, const at::Tensor& up);

/// (dgate, dup) of gated's gradient dy, without autograd.
std::tuple<at::Tensor, at::Tensor> gated_gradients(
    GateActivation activation,
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up);
inline std::tuple<at::Tensor, at::Tensor> swiglu_gradients(
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up) {
  return gated_gradients(GateActivation::silu, dy, gate, up);
}

/// layer(gated(activation, gate, up), residual) without keeping the gated
/// value, the largest activation of a block: the pass of the backward that
/// reads both gate and up writes it again.
///
/// @param gate, up   [..., in]
/// @param residual   [..., out] or undefined
/// @param is_unread  nothing reads the values of the result: it has none, and
///   the matmul is not run (see in_second_run), nor are hooks that read them.
///   A layer with a bias, or a unit, computes it nevertheless.
at::Tensor gated_linear(
    GateActivation activation,
    const at::Tensor& gate,
    const at::Tensor& up,
    LinearImpl& layer,
    const at::Tensor& residual,
    bool is_unread = false);

inline at::Tensor swiglu_linear(
    const at::Tensor& gate,
    const at::Tensor& up,
    LinearImpl& layer,
    const at::Tensor& residual,
    bool is_unread = false) {
  return gated_linear(
      GateActivation::silu,
      gate,
      up,
      layer,
      residual,
      is_unread);
}

}  // namespace flatshard::nn
