#pragma once

#include "flatshard/nn/module.h"
#include "flatshard/nn/parallel/tensor_parallel.h"

#include <cstdint>
#include <tuple>

namespace flatshard::nn {

/// y = x / sqrt(mean(x^2) + eps) * weight over the last dim, in float32, then
/// rounded once to x's dtype.
///
/// @param x       [..., dim]
/// @param weight  [dim], x's dtype or float32
/// Source: Zhang and Sennrich, arXiv:1910.07467.
at::Tensor rms_norm(
    const at::Tensor& x,
    const at::Tensor& weight,
    double eps,
    const ModuleContextPtr& context = {});

/// Computes sum = x + delta, and returns (sum, rms_norm(sum)). One pass on
/// CUDA. Continue with `sum` as the residual stream, not with x: both gradients
/// then meet in one pass of the backward.
///
/// @param delta  like x, or undefined: then sum is x, and no copy of it.
std::tuple<at::Tensor, at::Tensor> add_rms_norm(
    const at::Tensor& x,
    const at::Tensor& delta,
    const at::Tensor& weight,
    double eps,
    const ModuleContextPtr& context = {});

struct RmsNormOptions {
  double eps = 1e-5;
  /// Rows are multiplied by 1 + weight, in float32; weights start as zeros.
  bool adds_one = false;
  /// Each of these ranks has an equal part of a row's columns, and the mean
  /// covers all parts, by plain operations. Null: this rank has full rows.
  TensorParallelPtr ranks = nullptr;
};

/// Parameter: weight [dim], ones at first; with RmsNormOptions::ranks this
/// rank's part.
class RmsNormImpl : public Module, public HasParts {
 public:
  /// @param dim  of unsharded rows.
  explicit RmsNormImpl(std::int64_t dim, RmsNormOptions options = {});
  explicit RmsNormImpl(std::int64_t dim, double eps)
      : RmsNormImpl(dim, RmsNormOptions{.eps = eps}) {}
  at::Tensor forward(const at::Tensor& x);
  /// add_rms_norm with this module's weight; delta may be undefined.
  std::tuple<at::Tensor, at::Tensor> forward(
      const at::Tensor& x,
      const at::Tensor& delta);
  const at::Tensor& weight() const { return weight_; }
  double eps() const { return options_.eps; }
  /// Returns the factor of rows: the weight, or 1 + weight.
  at::Tensor scale() const;
  /// Context that gets the gradient of `scale`; null if autograd delivers it.
  ModuleContextPtr scale_context() const;
  ParameterParts parts() const override;

 private:
  at::Tensor norm_of_parts(const at::Tensor& x) const;

  std::int64_t dim_;
  at::Tensor weight_;
  RmsNormOptions options_;
};
FLATSHARD_MODULE(RmsNorm);

/// deliver_wgrad for the weight of a norm.
at::Tensor deliver_norm_wgrad(
    const ModuleContextPtr& context,
    const at::Tensor& weight,
    const at::Tensor& dw);

}  // namespace flatshard::nn
