#pragma once

#include "flatshard/nn/recompute.h"

namespace flatshard::nn {

// The parts of a node whose backward runs its forward again.

/// Returns whether this thread is in the second run of a recomputed part. The
/// first run of a part inside it has no gradient mode.
bool in_second_run();

/// Returns the inputs and an anchor: if no input needed a gradient, the node
/// would not be part of the graph, and the owner's parameters would silently
/// get none.
TensorList with_anchor(Module& owner, const TensorList& inputs);

/// @throws Error{usage} in a backward that cannot contain another one.
void check_nested_backward();

/// Notifies the owner's listener that a second run follows.
void notify_recompute(Module& owner);

/// Runs fn(args) with gradients, and then backward through it in a nested graph
/// task.
/// @param args   an argument that requires a gradient gets one.
/// @param grads  one per output; undefined: it has none.
/// @return       one per argument; undefined: it has none.
TensorList differentiate_again(
    const RecomputeFn& fn,
    TensorList args,
    const TensorList& grads);

}  // namespace flatshard::nn
