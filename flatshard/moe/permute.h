#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace flatshard::nn {

/// The order of (token, slot) pairs by expert. A pair is token * slots + slot.
struct Permutation {
  /// int32 [tokens * slots]: the pair of each row. Pairs of one expert keep
  /// their order; dropped ones are last.
  at::Tensor order;
  at::Tensor inverse;  ///< int32 [tokens, slots]: the row; -1: dropped
  bool drops = true;   ///< false: each pair has a row, and kernels are spared

  std::int64_t tokens() const { return inverse.size(0); }
  std::int64_t slots() const { return inverse.size(1); }
  std::int64_t rows() const { return order.size(0); }
};

/// Sorts by counting, stably.
///
/// @param experts  int32 [tokens, slots] in [0, experts], the last for dropped
/// @param counts   int32 [experts], how often each occurs
Permutation sort_by_expert(const at::Tensor& experts, const at::Tensor& counts);

/// Row r belongs to the token of pair order[r]: each token once for each of its
/// slots. Its gradient is sum_rows_of_tokens.
///
/// @param x  [tokens, dim]
/// @return   [tokens * slots, dim]
at::Tensor permute_rows(const at::Tensor& x, const Permutation& permutation);

/// out[t] = addend[t] + the rows of t, added up in float32 in the order of its
/// slots and rounded once. Dropped rows add nothing, and are not read. The
/// gradient of the rows is permute_rows.
///
/// @param rows    [tokens * slots, dim]
/// @param addend  [tokens, dim], or [..., dim] of as many tokens, or undefined,
///   e.g. the residual
/// @return        of addend's shape, or [tokens, dim]
at::Tensor sum_rows_of_tokens(
    const at::Tensor& rows,
    const Permutation& permutation,
    const at::Tensor& addend = {});

/// Returns the routing weight of each row; dropped pairs get no gradient.
///
/// @param weights  float32 [tokens, slots]
/// @return         float32 [tokens * slots]
at::Tensor permute_weights(
    const at::Tensor& weights,
    const Permutation& permutation);

}  // namespace flatshard::nn
