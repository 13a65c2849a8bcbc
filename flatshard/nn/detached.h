#pragma once

#include "flatshard/nn/visit.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <vector>

namespace flatshard::nn {

/// A piece of a forward that is detached from the rest of its graph, so that a
/// schedule can run its backward separately: one run of the autograd engine
/// over only this piece. Gradients of parameters arrive as always, while
/// gradients of inputs are returned.
///
/// When pieces run one after the other, gradients are bitwise equal to those
/// from the unsplit graph in two cases. No tensor inside a piece has more than
/// two readers, or the piece's outputs are read by one operation each.
///
/// It keeps the inputs and outputs that the piece's operations keep, and no
/// more.
class DetachedNode {
 public:
  using Body = std::function<TensorList(const TensorList& inputs)>;

  /// Runs `body` with gradients over tensors that share the inputs' memory, and
  /// keeps its graph. Inputs that need a gradient have requires_grad set, as do
  /// the outputs.
  /// @return  the outputs without their graph.
  TensorList forward(const TensorList& inputs, const Body& body);

  /// Once for each forward; the graph is gone then, also after an exception.
  /// @param gradients  one entry per output; undefined where there is none.
  /// @return  one entry per input; undefined where there is none.
  /// @throws Error{usage} without a forward, or if the number of gradients
  ///   differs.
  TensorList backward(const TensorList& gradients);

  bool has_graph() const { return has_graph_; }
  /// Forgets the graph, and what it keeps alive.
  void drop();

 private:
  /// The gradient of an input, once it has arrived.
  struct Arrival : torch::CustomClassHolder {
    at::Tensor gradient;
  };
  struct CutFunction;

  /// One for each input; null where no gradient is needed.
  std::vector<c10::intrusive_ptr<Arrival>> arrivals_;
  /// One for each output; without a function where there is no gradient.
  torch::autograd::edge_list outputs_;
  bool has_graph_ = false;
};

}  // namespace flatshard::nn
