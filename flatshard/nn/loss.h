#pragma once

#include "flatshard/nn/parallel/tensor_parallel.h"
#include "flatshard/nn/wgrad.h"

#include <cstdint>

namespace flatshard::nn {

enum class LossReduction {
  mean,  ///< over tokens that are not ignored; 0 when there is none
  sum,
};

struct LossOptions {
  static constexpr std::int64_t kIgnoreIndex = -100;

  LossReduction reduction = LossReduction::mean;
  std::int64_t ignore_index = kIgnoreIndex;
  /// 0: forward keeps the gradient of the logits, [tokens, vocab] in the
  /// compute dtype, and backward is two matmuls; one writes into the weight's
  /// sink. Otherwise at most this many tokens' logits exist at a time. Forward
  /// then computes the gradients of hidden and weight (float32), and backward
  /// scales them. Source: Hsu et al., arXiv:2410.10989.
  std::int64_t chunk_tokens = 0;
  /// Logits become cap * tanh(logits / cap), by plain operations that need one
  /// more tensor of a chunk's logits; 0: they stay.
  double soft_cap = 0.0;
  /// Each of these ranks has a part of the vocabulary, split as by `part_of`,
  /// for all tokens; null: the weight is unsharded. The ranks exchange two
  /// float32 numbers per token, and never logits.
  TensorParallelPtr ranks = nullptr;
  std::int64_t vocab = 0;  ///< with `ranks`: on all of them together
};

/// cap * tanh(logits / cap); the logits themselves for a cap of 0.
at::Tensor soft_capped(const at::Tensor& logits, double cap);

/// Computes the cross-entropy of `hidden weight^T` in float32, without float32
/// logits of the entire sequence and without a gradient tensor in addition to
/// the logits.
///
/// @param hidden   [..., dim]
/// @param weight   [vocab, dim], hidden's dtype; with LossOptions::ranks this
///   rank's rows of it. The gradient of hidden is then an addend of the ranks'.
/// @param targets  int64, hidden's shape without the last dim
/// @return float32 scalar
///
/// Without chunks forward does not compute the gradients of hidden and weight:
/// they would need vocab * dim elements from forward to backward and a copy
/// into the sink.
at::Tensor linear_cross_entropy(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const at::Tensor& targets,
    const LossOptions& options = {},
    const ModuleContextPtr& context = {});

}  // namespace flatshard::nn
