#pragma once

#include "flatshard/nn/visit.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <vector>

namespace flatshard::nn {

/// A piece of a forward that is cut off from the rest of its graph, so that a
/// schedule can run its backward by itself: one run of the autograd engine over
/// this piece alone. Gradients of parameters arrive as always; those of inputs
/// are handed out.
///
/// With pieces one after the other, gradients are bitwise those of the uncut
/// graph where no tensor inside of a piece has more than two readers, or where
/// the piece's outputs are read by one operation each.
///
/// Of inputs and outputs it keeps what the piece's operations keep, and no
/// more.
class DetachedNode {
 public:
  using Body = std::function<TensorList(const TensorList& inputs)>;

  /// Runs `body` with gradients over tensors that share the inputs' memory, and
  /// keeps its graph. Inputs that are wanted to have a gradient say so by
  /// requires_grad, as do the outputs.
  /// @return  the outputs without their graph.
  TensorList forward(const TensorList& inputs, const Body& body);

  /// Once for each forward; the graph is gone then, also after an exception.
  /// @param gradients  one entry per output; undefined where there is none.
  /// @return  one entry per input; undefined where there is none.
  /// @throws Error{usage} without a forward, or for another number of
  ///   gradients.
  TensorList backward(const TensorList& gradients);

  bool has_graph() const { return has_graph_; }
  /// Forgets the graph, and what it keeps alive.
  void drop();

 private:
  /// The gradient of an input, once it is there.
  struct Arrival : torch::CustomClassHolder {
    at::Tensor gradient;
  };
  struct CutFunction;

  /// By input; null where no gradient is wanted.
  std::vector<c10::intrusive_ptr<Arrival>> arrivals_;
  /// By output; without a function where there is no gradient.
  torch::autograd::edge_list outputs_;
  bool has_graph_ = false;
};

}  // namespace flatshard::nn
