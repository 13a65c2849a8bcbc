#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace flatshard::nn {

struct AttentionArgs {
  double scale = 0.0;  ///< of scores; 0: 1 / sqrt(head_dim)
  /// Sliding window in tokens, including the token itself. 0: no window.
  std::int64_t window = 0;
  /// Soft cap for the scores: cap * tanh(scores / cap). 0 disables it.
  double soft_cap = 0.0;
  /// Uses plain operations on GPUs where no kernel fits.
  bool plain = false;
  /// [heads], q's dtype: an extra score per head that every token attends to
  /// and that has no value. So the weights of the values add up to less than 1.
  /// Undefined: no sinks. Gets a gradient.
  at::Tensor sinks;
};

/// Returns whether FlashAttention computes it: 16 bits on a GPU, head_dim a
/// multiple of 8 up to 256.
bool flash_attention_takes(const at::Tensor& q);

/// Sequences of different lengths that follow one another.
struct FlashSequences {
  at::Tensor offsets;  ///< int32 [n + 1]
  std::int64_t max_length = 0;
};

/// Causal FlashAttention; args.soft_cap is not read.
/// @param q, k, v    [batch, seq, heads, head_dim], and with `sequences`
/// [tokens,
///   heads, head_dim]
/// @param sequences  null: each row is one.
/// @return           as q is
at::Tensor flash_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const AttentionArgs& args,
    const FlashSequences* sequences = nullptr);

/// Returns the factor of scores; unset: the kernels' own, 1 / sqrt(head_dim).
std::optional<double> own_scale(const AttentionArgs& args);

/// Returns softmax(scores, -1) with a sink of each head added to the sums.
/// @param scores  [..., heads, queries, keys] float
/// @param sinks   [heads] or [heads * queries]; undefined: no sinks
at::Tensor softmax_with_sinks(
    const at::Tensor& scores,
    const at::Tensor& sinks);

/// @throws Error{config} naming `plain` unless plain operations may compute it.
void check_plain(const at::Tensor& q, const AttentionArgs& args);

/// causal_attention by plain operations. They keep the probabilities of all
/// blocks of queries for the backward.
/// @param document  int [batch, seq]: a token attends only to tokens with the
/// same number. Undefined: all tokens have the same number.
/// @return          as q is
/// @throws Error{config} on a GPU without args.plain.
at::Tensor plain_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const AttentionArgs& args,
    const at::Tensor& document = {});

/// Whether these are q [b, t, h, d] and k, v [b, t, kv, d] with h a multiple of
/// kv.
bool are_grouped_heads(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v);

/// Causal scaled-dot-product attention with grouped queries.
///
/// @param q     [batch, seq, heads, head_dim]
/// @param k, v  [batch, seq, kv_heads, head_dim]; heads % kv_heads == 0
/// @return      [batch, seq, heads * head_dim], contiguous
///
/// CUDA, 16-bit, head_dim a multiple of 8: cuDNN up to head_dim 128, because it
/// accepts these strides and fewer kv heads as they are. FlashAttention up to
/// head_dim 256, for a window below seq, and for sinks. Else what ATen chooses.
///
/// No kernel has soft caps, and none has windows or sinks for float32. Plain
/// operations then process one block of queries at a time. They keep the
/// probabilities of all blocks for the backward, batch * heads * seq * (window
/// or seq) elements. On a GPU this needs `plain`. A part that keeps attention
/// (KeptTensors) runs them again.
/// @throws Error{config} naming `plain` where no kernel fits.
at::Tensor causal_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const AttentionArgs& args = {});

}  // namespace flatshard::nn
