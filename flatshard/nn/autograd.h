#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "flatshard/core/error.h"
#include "flatshard/nn/wgrad.h"
#include "flatshard/ops/rows.h"

#include <memory>
#include <vector>

namespace flatshard::nn {

class TensorParallel;

// Helpers of this folder's autograd Functions.

/// State of a layer's node, except tensors.
struct NodeState : torch::CustomClassHolder {
  std::vector<ModuleContextPtr> contexts;                 ///< of its modules
  c10::intrusive_ptr<torch::CustomClassHolder> adapters;  ///< AdapterCalls
  std::shared_ptr<TensorParallel> ranks;
  bool adds = false;  ///< it has a residual, or of a norm a delta
  double eps = 0;     ///< of a norm
};

/// One entry for all of the node's state, because each one costs host time.
constexpr const char* kNodeState = "node";

/// Returns what the node keeps; null: nothing.
inline NodeState* find_node_state(torch::autograd::AutogradContext* ctx) {
  const auto found = ctx->saved_data.find(kNodeState);
  return found == ctx->saved_data.end()
             ? nullptr
             : static_cast<NodeState*>(found->second.toCapsule().get());
}

inline NodeState& node_state(torch::autograd::AutogradContext* ctx) {
  c10::IValue& entry = ctx->saved_data[kNodeState];
  if (entry.isNone()) {
    entry = c10::IValue::make_capsule(c10::make_intrusive<NodeState>());
  }
  return static_cast<NodeState&>(*entry.toCapsule());
}

/// Keeps the context of a node's only module; null stays null.
inline void save_context(
    torch::autograd::AutogradContext* ctx,
    const ModuleContextPtr& context) {
  if (context) {
    node_state(ctx).contexts = {context};
  }
}

inline ModuleContextPtr saved_context(torch::autograd::AutogradContext* ctx) {
  const NodeState* const state = find_node_state(ctx);
  return state && !state->contexts.empty() ? state->contexts.front()
                                           : ModuleContextPtr();
}

/// Used by backwards that ATen cannot differentiate.
inline void refuse_create_graph(const char* layer) {
  FLATSHARD_CHECK(
      !at::GradMode::is_enabled(),
      usage,
      "expected a backward without create_graph, got create_graph=true: {} has "
      "no second derivative",
      layer);
}

/// Returns an argument that may be undefined in the form a Function accepts.
inline std::optional<at::Tensor> as_optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

/// Returns the sizes of x with another last one.
inline std::vector<std::int64_t> with_last(
    const at::Tensor& x,
    std::int64_t last) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes.back() = last;
  return sizes;
}

/// Returns another shape over the same memory without a view relation, so that
/// a Function's result may be changed in place by its user.
inline at::Tensor reshape_result(at::Tensor tensor, at::IntArrayRef sizes) {
  return at::_unsafe_view(tensor, sizes);
}

}  // namespace flatshard::nn
