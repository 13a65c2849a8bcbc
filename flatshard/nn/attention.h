#pragma once

#include <ATen/core/Tensor.h>

namespace flatshard::nn {

/// Causal scaled-dot-product attention with grouped queries.
///
/// @param q     [batch, seq, heads, head_dim]
/// @param k, v  [batch, seq, kv_heads, head_dim]; heads % kv_heads == 0
/// @return      [batch, seq, heads * head_dim], contiguous
///
/// CUDA, 16-bit, head_dim <= 128 and a multiple of 8: cuDNN, which takes these
/// strides and fewer kv heads as they are. Else what ATen chooses.
at::Tensor
causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

}  // namespace flatshard::nn
