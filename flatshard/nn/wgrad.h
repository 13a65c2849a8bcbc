#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>

#include "flatshard/core/error.h"

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace flatshard::nn {

class Module;

/// The destination of a weight gradient.
struct WgradTarget {
  at::Tensor grad;  ///< the parameter's shape; its dtype may be another one
  bool accumulate = false;  ///< true: add (beta 1); false: overwrite (beta 0)
};

/// A weight gradient that is computed later.
struct LateWgrad {
  /// Queues its write, or with `accumulate` its addition, into `grad` on the
  /// current stream. Owns what it reads: the layer's input and its output's
  /// gradient.
  std::function<void(at::Tensor& grad, bool accumulate)> write;
  bool adds_to_float32 = false;  ///< see deliver_wgrad
};

/// Receives weight gradients directly from a layer's backward, so that they
/// need no separate tensor and no copy.
class WgradSink {
 public:
  virtual ~WgradSink() = default;
  /// Called in backward just before the gradient of `parameter` (same
  /// TensorImpl as the module's) is written. For nullopt the layer returns a
  /// defined gradient as usual; else it writes into the target and returns an
  /// undefined one. Layers do not call this for frozen parameters.
  virtual std::optional<WgradTarget> begin_wgrad(
      const at::Tensor& parameter) = 0;
  /// Called instead of begin_wgrad by a layer whose matmul adds to float32: the
  /// target is the sum of the step's microbatches itself. For nullopt the layer
  /// calls begin_wgrad.
  virtual std::optional<WgradTarget> begin_wgrad_sum(
      const at::Tensor& /*parameter*/) {
    return std::nullopt;
  }
  /// The write was queued on the current stream. Called once for each target
  /// that was returned, unless the layer wrote nothing there.
  virtual void end_wgrad(const at::Tensor& parameter) = 0;
  /// Returns whether the gradient of `parameter` should be delayed until after
  /// the gradients of inputs. Layers that support the delay call this in
  /// backward instead of begin_wgrad. If it is true, they hand the gradient
  /// over by `defer` and return an undefined one.
  virtual bool defers(const at::Tensor& /*parameter*/) { return false; }
  /// Keeps `write` until that time.
  virtual void defer(const at::Tensor& /*parameter*/, LateWgrad /*write*/) {
    FLATSHARD_THROW(
        internal,
        "a weight gradient was put off, and its sink keeps none");
  }
};

/// Tensors of a recomputed part, stored between its two runs. Destroyed without
/// a `done` if no backward comes.
class StoredActivations {
 public:
  virtual ~StoredActivations() = default;
  /// In backward: puts the tensors back into their places. Kernels of the
  /// current stream may read them until `done`.
  virtual void restore(std::vector<at::Tensor>& tensors) = 0;
  /// The kernels that read them are queued, and no other backward follows.
  virtual void done() = 0;
};

/// Follows recomputation; see nn/recompute.h.
class RecomputeListener {
 public:
  virtual ~RecomputeListener() = default;
  /// In backward, just before `owner` runs its checkpointed part again.
  virtual void recompute_begin(Module& owner) = 0;
  /// In forward: stores some of the tensors that a part keeps for its second
  /// run, and replaces them with undefined ones. Null: it stores none.
  virtual std::unique_ptr<StoredActivations> store(
      std::vector<at::Tensor>& /*tensors*/) {
    return nullptr;
  }
};

class RegionRunner;
class WeightSource;

/// How autograd nodes of a module's layers reach it. All references are weak: a
/// graph or a module never keeps a runtime alive.
struct ModuleContext : torch::CustomClassHolder {
  std::weak_ptr<RegionRunner> region_runner;  ///< see nn/region.h
  std::weak_ptr<WgradSink> wgrad_sink;
  std::weak_ptr<WeightSource> weight_source;  ///< see nn/weight_source.h
  std::weak_ptr<RecomputeListener> recompute_listener;
};
using ModuleContextPtr = c10::intrusive_ptr<ModuleContext>;

/// Hands the gradient of `parameter` to the context's sink.
///
/// @param context  may be null: then there is no sink.
/// @param compute  () -> tensor, the gradient; used if the sink has no target,
///                 and under create_graph.
/// @param write    (at::Tensor& grad, bool accumulate) -> void, queues the
///                 write or the addition into `grad`.
/// @param adds_to_float32  `write` is one kernel for a float32 `grad` too.
/// @return the gradient, or an undefined tensor if the sink got it.
template <class Compute, class Write>
at::Tensor deliver_wgrad(
    const ModuleContextPtr& context,
    const at::Tensor& parameter,
    Compute&& compute,
    Write&& write,
    bool adds_to_float32 = false) {
  const auto sink = context && !at::GradMode::is_enabled()
                        ? context->wgrad_sink.lock()
                        : nullptr;
  if (!sink) {
    return compute();
  }
  std::optional<WgradTarget> target;
  if (adds_to_float32) {
    target = sink->begin_wgrad_sum(parameter);
  }
  if (!target) {
    target = sink->begin_wgrad(parameter);
  }
  if (!target) {
    return compute();
  }
  FLATSHARD_CHECK(
      target->grad.sizes() == parameter.sizes(),
      internal,
      "expected a gradient target of the parameter's {} elements, got {}",
      parameter.numel(),
      target->grad.numel());
  write(target->grad, target->accumulate);
  sink->end_wgrad(parameter);
  return {};
}

/// Defers the gradient of `parameter` if the context's sink requests it.
///
/// @param make  () -> LateWgrad
/// @return whether it is delayed; then the layer returns an undefined gradient.
template <class Make>
bool defer_wgrad(
    const ModuleContextPtr& context,
    const at::Tensor& parameter,
    Make&& make) {
  const auto sink = context && !at::GradMode::is_enabled()
                        ? context->wgrad_sink.lock()
                        : nullptr;
  if (!sink || !sink->defers(parameter)) {
    return false;
  }
  sink->defer(parameter, make());
  return true;
}

/// deliver_wgrad for a gradient that is computed as a tensor first.
template <class Compute>
at::Tensor deliver_wgrad(
    const ModuleContextPtr& context,
    const at::Tensor& parameter,
    Compute&& compute) {
  return deliver_wgrad(
      context,
      parameter,
      compute,
      [&](at::Tensor& grad, bool accumulate) {
        const at::Tensor value = compute();
        accumulate ? grad.add_(value) : grad.copy_(value);
      });
}

}  // namespace flatshard::nn
