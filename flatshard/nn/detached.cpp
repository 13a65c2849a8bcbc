#include "flatshard/nn/detached.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <utility>

namespace flatshard::nn {
namespace {

at::Tensor detached_leaf(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  at::Tensor leaf = tensor.detach();
  leaf.set_requires_grad(tensor.requires_grad());
  return leaf;
}

}  // namespace

TensorList DetachedNode::forward(const TensorList& inputs, const Body& body) {
  drop();
  const at::AutoGradMode with_grad(true);
  TensorList leaves;
  leaves.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    leaves.push_back(detached_leaf(input));
  }
  outputs_ = body(leaves);
  leaves_ = std::move(leaves);
  has_graph_ = true;
  TensorList out;
  out.reserve(outputs_.size());
  for (const at::Tensor& output : outputs_) {
    out.push_back(detached_leaf(output));
  }
  return out;
}

TensorList DetachedNode::backward(const TensorList& gradients) {
  FLATSHARD_CHECK(
      has_graph_,
      usage,
      "the backward of a detached node: expected a forward before it, got none "
      "since the last backward");
  FLATSHARD_CHECK(
      gradients.size() == outputs_.size(),
      usage,
      "the backward of a detached node: expected {} gradients, one per output, "
      "got {}",
      outputs_.size(),
      gradients.size());
  const TensorList leaves = std::exchange(leaves_, {});
  const TensorList outputs = std::exchange(outputs_, {});
  has_graph_ = false;
  TensorList roots;
  TensorList root_grads;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (gradients[i].defined() && outputs[i].defined() &&
        outputs[i].requires_grad()) {
      roots.push_back(outputs[i]);
      root_grads.push_back(gradients[i]);
    }
  }
  if (!roots.empty()) {
    torch::autograd::backward(roots, root_grads);
  }
  TensorList out;
  out.reserve(leaves.size());
  for (const at::Tensor& leaf : leaves) {
    out.push_back(
        leaf.defined() ? std::exchange(leaf.mutable_grad(), {}) : at::Tensor());
  }
  return out;
}

void DetachedNode::drop() {
  leaves_.clear();
  outputs_.clear();
  has_graph_ = false;
}

}  // namespace flatshard::nn
