#pragma once

#include "flatshard/nn/recompute.h"
#include "flatshard/nn/wgrad.h"

#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <vector>

namespace flatshard::nn {

// The parts of a node whose backward runs its forward again.

/// While one exists, this thread is in the second run of a part.
class SecondRun {
 public:
  /// @param is_one  false: in none, although a part around this code may be.
  explicit SecondRun(bool is_one = true);
  ~SecondRun();
  SecondRun(const SecondRun&) = delete;
  SecondRun& operator=(const SecondRun&) = delete;

 private:
  bool outer_;
};

/// While one exists, this thread is in the first run of a part that is run
/// again in its backward: see in_checkpointed_forward.
class FirstRun {
 public:
  FirstRun();
  ~FirstRun();
  FirstRun(const FirstRun&) = delete;
  FirstRun& operator=(const FirstRun&) = delete;

 private:
  SecondRun not_second_;  // a part around this one may be in it
};

/// Returns whether the innermost recomputed part that this thread runs is in
/// its second run. Then nothing reads the values of the part's own result: the
/// layer that makes it need not compute them.
bool in_second_run();

/// Returns a tensor for the graph: one NaN that stands for all elements.
at::Tensor without_values(
    at::IntArrayRef sizes,
    const at::TensorOptions& options);

/// Returns the inputs and an anchor: if no input needed a gradient, the node
/// would not be part of the graph, and the owner's parameters would silently
/// get none.
TensorList with_anchor(Module& owner, const TensorList& inputs);

/// @throws Error{usage} in a backward that cannot contain another one.
void check_nested_backward();

/// Notifies the owner's listener that a second run follows.
void notify_recompute(Module& owner);

/// The tensors that a node keeps for its second run: it saves them, unless the
/// listener of their owner stores them.
class SecondRunTensors {
 public:
  /// In the node's forward.
  /// @param inputs  of the node, with its anchor. If none requires a gradient,
  ///                the node has no backward and nothing is stored.
  void keep(
      torch::autograd::AutogradContext& ctx,
      Module& owner,
      at::TensorList inputs,
      TensorList tensors);
  /// In its backward: returns the tensors. An input that required a gradient
  /// requires one.
  TensorList take(torch::autograd::AutogradContext& ctx);
  /// The second run and its backward are queued.
  void done();

 private:
  std::unique_ptr<StoredActivations> stored_;
  std::vector<bool> require_grad_;
};

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
