#pragma once

#include "flatshard/nn/module.h"

#include <functional>

namespace flatshard::nn {

struct RecomputeOptions {
  /// Replays random draws: of the default generators of the CPU and of the
  /// inputs' devices, and of each explicit generator below `owner`
  /// (Module::own_generators). Turn off for parts that draw nothing.
  bool preserve_rng = true;
};

using RecomputeFn = std::function<TensorList(const TensorList&)>;

/// Runs fn(inputs) without keeping its activations: only the inputs are kept,
/// and backward runs fn again and then backward through it, in a separate
/// (nested) graph task. Parameters that fn reads get their gradients in that
/// task.
///
/// Before the second run the listener of `owner` gets recompute_begin. fn's
/// captures must outlive the graph, and `owner` is kept alive. fn must return
/// the same shapes each time. Its outputs are differentiable tensors.
/// @throws Error{usage} when fn writes into its inputs; in backward under
/// create_graph or with an inputs= list: a nested backward supports neither.
/// Source: Chen et al., arXiv:1604.06174.
TensorList checkpoint(
    Module& owner,
    RecomputeFn fn,
    const TensorList& inputs,
    RecomputeOptions options = {});

/// Returns whether this thread is in the first run of a checkpointed part:
/// without gradient mode, but a backward will follow.
bool in_checkpointed_forward();

/// Returns the same for one tensor in and one out.
at::Tensor checkpoint(
    Module& owner,
    std::function<at::Tensor(const at::Tensor&)> fn,
    const at::Tensor& input,
    RecomputeOptions options = {});

}  // namespace flatshard::nn
