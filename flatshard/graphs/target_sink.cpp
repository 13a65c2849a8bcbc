#include "flatshard/graphs/target_sink.h"

#include <utility>

namespace flatshard {

void TargetSink::add(const at::Tensor& parameter, nn::WgradTarget target) {
  targets_[parameter.unsafeGetTensorImpl()] = std::move(target);
}

bool TargetSink::written(const at::Tensor& parameter) const {
  return written_.contains(parameter.unsafeGetTensorImpl());
}

at::Tensor TargetSink::place(const at::Tensor& parameter) const {
  const auto found = targets_.find(parameter.unsafeGetTensorImpl());
  return found == targets_.end() ? at::Tensor() : found->second.grad;
}

std::optional<nn::WgradTarget> TargetSink::begin_wgrad(
    const at::Tensor& parameter) {
  const auto found = targets_.find(parameter.unsafeGetTensorImpl());
  if (found == targets_.end()) {
    return std::nullopt;
  }
  nn::WgradTarget target = found->second;
  target.accumulate = target.accumulate || written(parameter);
  return target;
}

void TargetSink::end_wgrad(const at::Tensor& parameter) {
  written_.insert(parameter.unsafeGetTensorImpl());
}

}  // namespace flatshard
