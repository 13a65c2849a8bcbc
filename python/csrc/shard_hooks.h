#pragma once

#include <ATen/core/Tensor.h>

// The hooks that a program put on a shard. A shard is not part of autograd's
// graph, so its views of gradients call them. With the GIL.
namespace flatshard::python {

/// Returns whether some hook gets the gradient before it is added to `.grad`: a
/// hook of Tensor.register_hook, or of register_prehook of the accumulator.
bool has_tensor_hooks(const at::Tensor& shard);
/// Returns what these make of `grad`.
at::Tensor run_tensor_hooks(const at::Tensor& shard, const at::Tensor& grad);

/// Returns whether some hook follows the gradient: of
/// register_post_accumulate_grad_hook, or of register_hook of the accumulator.
bool has_post_hooks(const at::Tensor& shard);
void run_post_hooks(const at::Tensor& shard);

}  // namespace flatshard::python
