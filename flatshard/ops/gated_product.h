#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/ops/gate_activation.h"

#include <tuple>

namespace flatshard::nn {

/// Returns activation(gate) * up, of gate's shape and dtype. While gradients
/// are on, autograd can differentiate it: no kernel is used.
at::Tensor gated_product(
    GateActivation activation,
    const at::Tensor& gate,
    const at::Tensor& up);

/// @param d        gradient of the gated value
/// @param product  the pass may also write the gated value over d: then
///   `product` becomes d, else it is unchanged.
/// @return (dgate, dup)
std::tuple<at::Tensor, at::Tensor> gated_product_backward(
    GateActivation activation,
    const at::Tensor& d,
    const at::Tensor& gate,
    const at::Tensor& up,
    at::Tensor* product = nullptr);

}  // namespace flatshard::nn
