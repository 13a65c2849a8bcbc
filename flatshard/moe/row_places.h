#pragma once

#include "flatshard/moe/permute.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace flatshard::nn {

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

/// permute_rows into two tensors. No graph.
///
/// @param x        [tokens, dim]
/// @param num_rows  as for row_places
/// @param leaving  [num_rows or more, dim]; rows that stay are left as they are
/// @param staying  [any, dim]; likewise only rows of runs
void permute_rows_into(
    const at::Tensor& x,
    const Permutation& permutation,
    const RowPlaces& places,
    std::int64_t num_rows,
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
