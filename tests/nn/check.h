#pragma once

#include <gtest/gtest.h>

#include <torch/csrc/autograd/autograd.h>

#include "flatshard/nn/wgrad.h"

namespace flatshard::nn {

/// Returns the largest `|got - want|`, relative to the largest `|want|`.
inline double relative_error(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor w = want.detach().to(at::kDouble);
  const at::Tensor g = got.detach().to(at::kDouble);
  const double scale = w.abs().max().item<double>();
  return (g - w).abs().max().item<double>() / (scale > 0 ? scale : 1.0);
}

/// Half a unit in the last place, relative.
inline double epsilon(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 0x1p-8 : 0x1p-24;
}

/// A sink that gives every parameter a buffer of the given dtype, filled with
/// NaN so that a write which should overwrite but adds shows.
class FakeSink : public WgradSink {
 public:
  explicit FakeSink(at::ScalarType dtype) : dtype_(dtype) {}

  std::optional<WgradTarget> begin_wgrad(const at::Tensor& p) override {
    Entry& entry = entries_[p.unsafeGetTensorImpl()];
    if (!entry.grad.defined()) {
      entry.grad = at::full_like(
          p.detach(),
          std::numeric_limits<double>::quiet_NaN(),
          p.options().dtype(dtype_).requires_grad(false));
    }
    ++entry.begun;
    return WgradTarget{.grad = entry.grad, .accumulate = entry.ended > 0};
  }

  void end_wgrad(const at::Tensor& p) override {
    ++entries_.at(p.unsafeGetTensorImpl()).ended;
  }

  at::Tensor grad(const at::Tensor& p) const {
    return entries_.at(p.unsafeGetTensorImpl()).grad;
  }
  bool balanced() const {
    for (const auto& [impl, entry] : entries_) {
      if (entry.begun != entry.ended) {
        return false;
      }
    }
    return !entries_.empty();
  }

 private:
  struct Entry {
    at::Tensor grad;
    int begun = 0;
    int ended = 0;
  };
  at::ScalarType dtype_;
  std::map<const c10::TensorImpl*, Entry> entries_;
};

}  // namespace flatshard::nn
