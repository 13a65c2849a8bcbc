#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace flatshard {

/// Returns whether `x` can be viewed as elements of 16 bytes.
inline bool has_wide_rows(const at::Tensor& x) {
  const std::int64_t ratio = 16 / static_cast<std::int64_t>(x.element_size());
  const std::int64_t last = x.dim() - 1;
  if (x.dim() == 0 || x.stride(last) != 1 || x.size(last) % ratio != 0 ||
      x.storage_offset() % ratio != 0) {
    return false;
  }
  for (std::int64_t i = 0; i < last; ++i) {
    if (x.stride(i) % ratio != 0) {
      return false;
    }
  }
  return true;
}

/// to.copy_(from) for tensors of one dtype. ATen copies strided tensors element
/// by element. That is slow for elements of 2 bytes, so they have 16 bytes
/// where both tensors allow it.
inline void copy_wide(const at::Tensor& to, const at::Tensor& from) {
  if (has_wide_rows(to) && has_wide_rows(from)) {
    to.view(at::kComplexDouble).copy_(from.view(at::kComplexDouble));
  } else {
    to.copy_(from);
  }
}

/// Returns a contiguous copy, or `x` where it is contiguous.
inline at::Tensor packed(const at::Tensor& x) {
  if (x.is_contiguous()) {
    return x;
  }
  at::Tensor copy = at::empty(x.sizes(), x.options());
  copy_wide(copy, x);
  return copy;
}

}  // namespace flatshard
