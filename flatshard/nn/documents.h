#pragma once

#include "flatshard/nn/attention.h"
#include "flatshard/nn/module.h"
#include "flatshard/nn/visit.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace flatshard::nn {

/// Documents that share the sequences of a batch: attention stays within each,
/// and each starts at position 0. They follow one another through the rows of
/// the batch, and none crosses the end of a row. Padding is a document, too.
struct Documents {
  /// int32 [n + 1]: the first token of each document, counted through all rows,
  /// then the number of tokens. Documents without tokens are allowed, so one
  /// size serves batches with fewer documents.
  at::Tensor offsets;
  at::Tensor positions;  ///< int32 [batch * seq]: of each token
  /// Length of the longest document, or more. Kernels are launched for it.
  std::int64_t max_length = 0;
  /// bool [batch * seq]: whether a token is padding. Routers of experts skip
  /// padding. Undefined: no token is padding.
  at::Tensor padding;

  /// @param lengths  of the documents; their sum is the number of tokens.
  /// @param seq_len  of a row.
  /// @param padding  the number of tokens at the end of each row that are
  ///   padding; empty: there are none.
  /// @throws Error{usage} where a document is empty or crosses the end of a
  /// row.
  static Documents of(
      std::span<const std::int64_t> lengths,
      std::int64_t seq_len,
      at::Device device,
      std::span<const std::int64_t> padding = {});

  bool defined() const { return offsets.defined(); }

  // The same as inputs of a region. A tensor without elements has max_length in
  // its shape, so that a recorded region notices another one. `padding` is not
  // among them: attention and rotations do not read it.

  /// Appends the tensors; nothing where they are not defined.
  void append_to(TensorList& inputs) const;
  /// Returns the documents that `append_to` appended to `count` inputs.
  static Documents after(const TensorList& inputs, std::size_t count);
};

/// Fills offsets and positions, as Documents has them.
/// @throws as Documents::of; Error{usage} for more documents than offsets has
/// places for.
void write_documents(
    std::span<const std::int64_t> lengths,
    std::int64_t seq_len,
    std::span<std::int32_t> offsets,
    std::span<std::int32_t> positions);

/// Fills `padding` [rows * seq_len]: whether a token is padding.
/// @param num_padding  of each row, at its end.
void write_padding(
    std::span<const std::int64_t> num_padding,
    std::int64_t seq_len,
    std::span<bool> padding);

/// Returns the length of each token's document, int64 [batch * seq].
at::Tensor lengths_of_tokens(const Documents& documents);

/// Causal scaled-dot-product attention with grouped queries, within documents.
///
/// @param q     [batch, seq, heads, head_dim]
/// @param k, v  [batch, seq, kv_heads, head_dim]; heads % kv_heads == 0
/// @return      [batch, seq, heads * head_dim], contiguous
///
/// CUDA, 16-bit, head_dim <= 256 and a multiple of 8: FlashAttention. Its work
/// depends only on the documents. Else on CUDA: a mask of seq * seq elements
/// for each row, and the work of full rows, in plain operations with soft caps
/// or sinks. On CPUs: one document after the other.
/// @throws Error{config} naming `plain` for soft caps on a GPU, and for sinks
/// that FlashAttention does not support.
at::Tensor document_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const Documents& documents,
    const AttentionArgs& args = {});

/// Hooks of modules see nothing of it: integers have no gradients.
template <>
inline constexpr bool holds_no_tensors<Documents> = true;

}  // namespace flatshard::nn
