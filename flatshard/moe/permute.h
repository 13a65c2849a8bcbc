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
  /// Returns only rows `[begin, end)`; `inverse` covers all rows.
  Permutation part(std::int64_t begin, std::int64_t end) const {
    return {order.slice(0, begin, end), inverse, drops};
  }
};

/// Sorts stably.
///
/// @param experts  int32 [tokens, slots] in [0, experts], the last for dropped
/// @param counts   int32 [experts], how often each occurs
Permutation sort_by_expert(const at::Tensor& experts, const at::Tensor& counts);

/// Counts how often each of `num_experts` experts is chosen.
///
/// @param experts  int32, any shape; larger numbers are not counted.
/// @return         int32 [num_experts]
at::Tensor count_experts(const at::Tensor& experts, std::int64_t num_experts);

/// The rows of tokens for experts that an external router chose.
struct ExpertOrder {
  Permutation permutation;
  at::Tensor counts;  ///< int32 [num_experts]
};

/// Sorts the choices by expert. No token is dropped.
///
/// @param experts  any integers [tokens, slots], in [0, num_experts).
/// @throws Error{usage} for another shape or dtype, and on CPUs for an expert
///   that does not exist.
ExpertOrder order_by_expert(
    const at::Tensor& experts,
    std::int64_t num_experts);

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
/// @param is_unread  as for gated_linear
/// @return        of addend's shape, or [tokens, dim]
at::Tensor sum_rows_of_tokens(
    const at::Tensor& rows,
    const Permutation& permutation,
    const at::Tensor& addend = {},
    bool is_unread = false);

/// Returns the routing weight of each row; dropped pairs get no gradient.
///
/// @param weights  float32 [tokens, slots]
/// @return         float32 [tokens * slots]
at::Tensor permute_weights(
    const at::Tensor& weights,
    const Permutation& permutation);

// Rows of a permutation that are in two tensors: rows that leave, each at its
// own index, and rows of runs that stay, elsewhere. So tokens are permuted into
// both, and their rows added up from both, without another copy.

/// Returns whether rows like these can: on the CPU all, on GPUs float32 and
/// bfloat16.
bool can_split_rows(const at::Tensor& rows);

/// The places of the rows of a permutation. A value v >= 0 is row v of the rows
/// that leave. v <= -2 is row -2 - v of the rows that stay, and -1 is dropped.
struct RowPlaces {
  at::Tensor of_rows;   ///< int32 [rows], in the order of the permutation
  at::Tensor of_pairs;  ///< int32 [tokens, slots]
};

/// @param runs      int32 [2, runs + 1], on the permutation's device: the first
///   row of each run that stays, and its first row among those that stay. Runs
///   follow each other; [0, runs] is where the last one ends.
/// @param num_rows  later ones are dropped.
RowPlaces row_places(
    const Permutation& permutation,
    const at::Tensor& runs,
    std::int64_t num_rows);

/// permute_rows into memory that is given, or into two tensors. No graph.
///
/// @param x        [tokens, dim]
/// @param places   RowPlaces::of_rows of these rows; undefined: all leave, row
///   by row.
/// @param leaving  [rows or more, dim]; rows that stay are left as they are
/// @param staying  [any, dim], likewise only rows of runs; undefined without
///   places
void permute_rows_into(
    const at::Tensor& x,
    const Permutation& permutation,
    const at::Tensor& places,
    const at::Tensor& leaving,
    const at::Tensor& staying);

/// Computes sum_rows_of_tokens of rows in two tensors, with bitwise identical
/// results. No graph.
///
/// @param leaving, staying  as for permute_rows_into
/// @param addend  [tokens, dim], of more dimensions, or undefined
/// @param out     [tokens, dim] or of addend's shape
void sum_rows_from(
    const at::Tensor& leaving,
    const at::Tensor& staying,
    const RowPlaces& places,
    const at::Tensor& addend,
    const at::Tensor& out);

}  // namespace flatshard::nn
