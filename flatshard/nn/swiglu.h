#pragma once

#include "flatshard/nn/linear.h"

#include <tuple>

namespace flatshard::nn {

/// silu(gate) * up, elementwise; same shape and dtype. On CUDA one pass each
/// way in float32.
/// Source: Shazeer, arXiv:2002.05202.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// (dgate, dup) of swiglu's gradient dy, without autograd.
std::tuple<at::Tensor, at::Tensor> swiglu_gradients(
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up);

/// layer(swiglu(gate, up), residual) without keeping the product of gate and
/// up, the largest activation of a block: the pass of the backward that reads
/// both writes it again.
///
/// @param gate, up  [..., in]
/// @param residual  [..., out]
at::Tensor swiglu_linear(
    const at::Tensor& gate,
    const at::Tensor& up,
    LinearImpl& layer,
    const at::Tensor& residual);

}  // namespace flatshard::nn
