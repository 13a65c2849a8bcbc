#pragma once

#include <ATen/core/Tensor.h>

namespace flatshard::nn {

/// [..., n] as [rows, n]; a copy only when the strides demand it.
inline at::Tensor as_rows(const at::Tensor& tensor) {
  return tensor.reshape({-1, tensor.size(-1)});
}

}  // namespace flatshard::nn
