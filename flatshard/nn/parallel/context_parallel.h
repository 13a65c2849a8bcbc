#pragma once

#include "flatshard/nn/visit.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace flatshard::nn {

/// Blocks that a rank sends to each rank of its group, and places for the
/// blocks that it receives. Both have the same sizes: `size` blocks in rank
/// order, [size, ...], or the first dimensions multiply to `size`. Any strides.
struct RankBlocks {
  at::Tensor send;     ///< block r is for rank r
  at::Tensor receive;  ///< block r comes from rank r; elements do not overlap
};

/// An exchange that is in flight.
class PendingExchange {
 public:
  virtual ~PendingExchange() = default;
  /// The received blocks are for kernels that the current stream gets from here
  /// on. Does not block the host on GPUs. Once.
  virtual void finish() = 0;
};

/// Exchanges heads of attention between the ranks that share the tokens of a
/// batch (context parallelism).
///
/// Between the attentions each rank has an equal run of the tokens, of all
/// heads: rank r has the rows [r * n / size, (r + 1) * n / size) of the
/// flattened [batch, seq]. In attention it has all tokens of an equal run of
/// the heads. So attention itself is the same as on one rank.
///
/// Tokens that are not shared have a null pointer instead, at the cost of a
/// branch.
/// Source: Jacobs et al., arXiv:2309.14509.
class ContextParallel {
 public:
  ContextParallel(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~ContextParallel() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Returns the bytes that it uses on the device itself.
  virtual std::int64_t nbytes() const { return 0; }

  /// Sends and receives all of `blocks` in one exchange, in parallel with what
  /// compute queues until `finish`. Makes no graph. Exchanges run in the order
  /// of their starts, on all ranks alike.
  virtual std::unique_ptr<PendingExchange> start(
      std::vector<RankBlocks> blocks) = 0;

 private:
  int rank_;
  int size_;
};
using ContextParallelPtr = std::shared_ptr<ContextParallel>;

/// Returns this rank's part of a tensor with a row for each token, or for each
/// head.
/// @param x  [n, ...]
/// @return   [n / size, ...], a view; x itself for null `ranks`.
/// @throws Error{usage} when the ranks do not divide n.
at::Tensor own_rows(const ContextParallelPtr& ranks, const at::Tensor& x);

/// Sends this rank's tokens of all heads to the ranks of these heads, all
/// tensors in one exchange. The backward is `to_tokens`.
///
/// Several ranks get the same head of a tensor with fewer heads than ranks
/// (keys and values). The owner of the tokens adds their
/// gradients in rank order, in float32 with one rounding.
///
/// @param x  each [batch, seq / size, heads, head_dim], any strides
/// @return   each [batch, seq, heads / size or 1, head_dim] contiguous; x
///   itself for null `ranks`.
/// @throws Error{config} when neither of heads and ranks divides the other.
TensorList to_heads(const ContextParallelPtr& ranks, const TensorList& x);

/// Sends the results of this rank's heads to the ranks of their tokens. The
/// backward is `to_heads`.
///
/// @param x  [batch, seq, dim / size], the columns of this rank's heads
/// @return   [batch, seq / size, dim] contiguous; x itself for null `ranks`.
/// @throws Error{usage} when the ranks do not divide seq.
at::Tensor to_tokens(const ContextParallelPtr& ranks, const at::Tensor& x);

}  // namespace flatshard::nn
