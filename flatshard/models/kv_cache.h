#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "flatshard/nn/attention.h"

namespace flatshard::models {

/// The tokens of a batch of sequences that one forward adds to KvCaches: the
/// first ones of one sequence, or one more of each of several.
struct CacheStep {
  std::int64_t first_row = 0;
  std::int64_t num_rows = 1;
  /// Tokens of the longest of these sequences, with the added ones.
  std::int64_t length = 0;
  /// int32 [num_rows], of the added tokens; undefined: a sequence starts.
  at::Tensor positions;

  bool begins() const { return !positions.defined(); }
};

/// Keys and values of one attention layer for a batch of sequences.
class KvCache {
 public:
  struct Shape {
    std::int64_t rows = 0;   ///< sequences
    std::int64_t slots = 0;  ///< tokens of each that it keeps: the last ones
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
  };

  /// Allocates 2 * rows * slots * kv_heads * head_dim elements.
  KvCache(const Shape& shape, const at::TensorOptions& options);

  /// Stores the keys and values of a step, and attends to all stored ones. A
  /// step that starts a sequence is causal_attention. Other steps run matmuls
  /// in float32, unfused, and read each key and value once for all heads of a
  /// group.
  ///
  /// @param q [num_rows, seq, heads, head_dim]; seq is 1 unless the step starts
  ///   a sequence
  /// @param k, v  [num_rows, seq, kv_heads, head_dim], already rotated
  /// @param args  a window is at least `slots`, or 0.
  /// @return      [num_rows, seq, heads * head_dim]
  at::Tensor attend(
      const at::Tensor& q,
      const at::Tensor& k,
      const at::Tensor& v,
      const nn::AttentionArgs& args,
      const CacheStep& step);

  std::int64_t nbytes() const;

 private:
  void fill(std::int64_t row, const at::Tensor& k, const at::Tensor& v);
  at::Tensor attend_to_stored(
      const at::Tensor& q,
      const nn::AttentionArgs& args,
      const CacheStep& step) const;

  std::int64_t slots_;
  /// [rows, kv_heads, slots, head_dim]; a token at position p is in slot
  /// p % slots.
  at::Tensor keys_;
  at::Tensor values_;
};

}  // namespace flatshard::models
