#pragma once

#include <ATen/core/Tensor.h>

namespace flatshard {

/// Returns the first byte of a contiguous tensor.
inline const char* begin_of(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

/// Returns whether both are contiguous, start at the same address and have as
/// many elements.
inline bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return begin_of(a) == begin_of(b) && a.numel() == b.numel();
}

/// Returns whether two contiguous tensors have bytes in common.
inline bool overlap(const at::Tensor& a, const at::Tensor& b) {
  return begin_of(a) < begin_of(b) + b.nbytes() &&
         begin_of(b) < begin_of(a) + a.nbytes();
}

}  // namespace flatshard
