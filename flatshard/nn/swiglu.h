#pragma once

#include <ATen/core/Tensor.h>

namespace flatshard::nn {

/// silu(gate) * up, elementwise; same shape and dtype. On CUDA one pass each
/// way in float32.
/// Source: Shazeer, arXiv:2002.05202.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace flatshard::nn
