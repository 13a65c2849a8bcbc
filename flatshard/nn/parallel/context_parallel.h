#pragma once

#include "flatshard/nn/parallel/tensor_parallel.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
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
  /// Compute's waits for exchanges are measured from now on, or no longer.
  virtual void measure(bool /*measures*/) {}
  /// Returns the time measured since the last call, in ms. Blocks the host.
  virtual double wait_and_take_exposed_ms() { return 0; }

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

/// Sums x over the ranks, in rank order, on all of them. Makes no graph. Only
/// for small tensors, since all addends are exchanged.
/// @return  x itself for null `ranks`.
at::Tensor sum_over_ranks(const ContextParallelPtr& ranks, const at::Tensor& x);

/// Heads that a call of attention computes, with all tokens.
struct HeadGroup {
  at::Tensor q, k, v;  ///< [batch, seq, heads, head_dim] contiguous
  IndexPart part;      ///< the places of q's heads among those of all ranks
};
/// Returns [batch, seq, heads * head_dim].
using AttendHeads = std::function<at::Tensor(const HeadGroup& heads)>;

/// Attention of tokens that ranks share. A rank sends q, k and v of its tokens
/// to the ranks of the heads, and calls `attend` for its own heads. It sends
/// the results to the ranks of the tokens. The backward sends the gradients the
/// other way.
///
/// The heads of a rank are two groups, where their number allows that: the
/// exchanges of one overlap the attention of the other, also in backward.
///
/// Several ranks get the same head of k and v with fewer heads than ranks. The
/// owner of the tokens adds their gradients in rank order, in float32 with one
/// rounding.
///
/// @param q      [batch, seq / size, heads, head_dim], any strides
/// @param k, v   [batch, seq / size, kv_heads, head_dim], any strides
/// @param attend  uses all tensors of a group. Null `ranks`: called once, with
///   q, k and v themselves.
/// @return       [batch, seq / size, heads * head_dim]
/// @throws Error{config} unless heads are a multiple of the ranks, and kv_heads
///   a multiple or a divisor.
at::Tensor attend_shared_tokens(
    const ContextParallelPtr& ranks,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const AttendHeads& attend);

}  // namespace flatshard::nn
