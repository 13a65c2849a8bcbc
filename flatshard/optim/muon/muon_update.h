#pragma once

#include <ATen/core/Tensor.h>

namespace flatshard {

// The element-wise parts of Muon, with the roundings of torch.optim.Muon: a
// multiplication and the addition after it round once. Each element is computed
// in the same way wherever a shard has it. All tensors have one dimension and
// equal sizes. Queues on the current CUDA stream, or runs on the host.

/// m += (1 - momentum) (g - m), and then
/// direction = nesterov ? g + momentum (m - g) : m.
///
/// @param grad        any float dtype.
/// @param grad_scale  [] float32 on the same device, multiplied into `grad`;
///   undefined for 1.
/// @param buffer      float32, m.
/// @param direction   bfloat16; overwritten.
void muon_direction(
    const at::Tensor& grad,
    const at::Tensor& grad_scale,
    const at::Tensor& buffer,
    const at::Tensor& direction,
    double momentum,
    bool nesterov);

/// w = w * (1 - decay) - step * direction.
///
/// @param main       any float dtype, w.
/// @param compute    any float dtype, a copy of w; undefined for none.
/// @param direction  bfloat16.
void muon_apply(
    const at::Tensor& main,
    const at::Tensor& compute,
    const at::Tensor& direction,
    double decay,
    double step);

}  // namespace flatshard
