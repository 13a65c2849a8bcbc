#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "flatshard/core/error.h"
#include "flatshard/nn/wgrad.h"

#include <string>
#include <vector>

namespace flatshard::nn {

// Helpers of this folder's autograd Functions.

/// Keeps a module's context in a node; null stays null. `index` distinguishes
/// several modules.
inline void save_context(
    torch::autograd::AutogradContext* ctx,
    const ModuleContextPtr& context,
    std::size_t index = 0) {
  if (context) {
    ctx->saved_data["context" + std::to_string(index)] =
        c10::IValue::make_capsule(context);
  }
}

inline ModuleContextPtr saved_context(
    torch::autograd::AutogradContext* ctx,
    std::size_t index = 0) {
  const auto found = ctx->saved_data.find("context" + std::to_string(index));
  if (found == ctx->saved_data.end()) {
    return {};
  }
  return ModuleContextPtr::reclaim_copy(
      static_cast<ModuleContext*>(found->second.toCapsule().get()));
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

/// Returns an argument that may be undefined in the form that a Function takes.
inline std::optional<at::Tensor> as_optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

/// [..., n] as [rows, n]; a copy only when the strides demand it.
inline at::Tensor as_rows(const at::Tensor& tensor) {
  return tensor.reshape({-1, tensor.size(-1)});
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
