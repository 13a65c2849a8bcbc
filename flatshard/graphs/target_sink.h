#pragma once

#include "flatshard/nn/wgrad.h"

#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace flatshard {

/// Writes the gradients of parameters to places that are known beforehand.
class TargetSink final : public nn::WgradSink {
 public:
  void add(const at::Tensor& parameter, nn::WgradTarget target);
  bool written(const at::Tensor& parameter) const;
  /// Returns the destination of its gradient; undefined: it has none.
  at::Tensor place(const at::Tensor& parameter) const;
  /// Adds later gradients of `parameter` to the existing one.
  std::optional<nn::WgradTarget> begin_wgrad(
      const at::Tensor& parameter) override;
  void end_wgrad(const at::Tensor& parameter) override;

 private:
  std::unordered_map<const c10::TensorImpl*, nn::WgradTarget> targets_;
  std::unordered_set<const c10::TensorImpl*> written_;
};

}  // namespace flatshard
