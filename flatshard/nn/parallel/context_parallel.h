#pragma once

#include "flatshard/core/token_parts.h"
#include "flatshard/nn/parallel/tensor_parallel.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace flatshard::nn {

struct AttentionArgs;
struct Documents;

/// Blocks that a rank sends to each rank of its group, and places for the
/// blocks that it receives. Both have the same sizes: `size` blocks in rank
/// order, [size, ...], or the first dimensions multiply to `size`. Any strides.
struct RankBlocks {
  at::Tensor send;     ///< block r is for rank r
  at::Tensor receive;  ///< block r comes from rank r; elements do not overlap
  /// All ranks get the same block: `send` is [size, ...], expanded. Equal on
  /// all ranks.
  bool is_one = false;
};

/// An exchange that is in flight.
class PendingExchange {
 public:
  virtual ~PendingExchange() = default;
  /// The received blocks are for kernels that the current stream gets from here
  /// on. Does not block the host on GPUs. Once.
  virtual void finish() = 0;
};

class ContextParallel;
using ContextParallelPtr = std::shared_ptr<ContextParallel>;

/// Exchanges heads of attention between the ranks that share the tokens of a
/// batch (context parallelism).
///
/// Between the attentions each rank has an equal part of the tokens, of all
/// heads: rank r has the rows [r * n / size, (r + 1) * n / size) of the
/// flattened [batch, seq]. In attention it has all tokens of an equal run of
/// the heads. So attention itself is the same as on one rank.
///
/// Over several hosts a rank exchanges heads with the ranks of its host. It
/// all-gathers keys and values of its heads from the ranks with its place on
/// the other hosts (`attend_over_hosts`). Token order: see TokenPart.
///
/// Tokens that are not shared have a null pointer instead, at the cost of a
/// branch.
/// Source: Jacobs et al., arXiv:2309.14509.
class ContextParallel {
 public:
  /// @param hosts  the ranks with this place on all hosts. Null: one host.
  ContextParallel(int rank, int size, ContextParallelPtr hosts = nullptr)
      : rank_(rank), size_(size), hosts_(std::move(hosts)) {}
  virtual ~ContextParallel() = default;

  // Among the ranks of the host.
  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Returns the ranks with this place on all hosts; null: there is one host.
  const ContextParallelPtr& hosts() const { return hosts_; }
  /// Returns the number of ranks that share the tokens, of all hosts.
  int num_ranks() const { return size_ * (hosts_ ? hosts_->size() : 1); }
  /// Returns the part of the tokens that this rank has.
  TokenPart part() const {
    return {
        .rank = rank_,
        .ranks = size_,
        .host = hosts_ ? hosts_->rank() : 0,
        .hosts = hosts_ ? hosts_->size() : 1};
  }
  /// Returns the bytes that it uses on the device itself.
  virtual std::int64_t nbytes() const { return 0; }
  /// Compute's waits for exchanges, also over hosts, are measured from now on,
  /// or no longer.
  virtual void measure(bool measures) {
    if (hosts_) {
      hosts_->measure(measures);
    }
  }
  /// Returns the time measured since the last call, in ms. Blocks the host.
  virtual double wait_and_take_exposed_ms() {
    return hosts_ ? hosts_->wait_and_take_exposed_ms() : 0;
  }

  /// Sends and receives all of `blocks` in one exchange, in parallel with what
  /// compute queues until `finish`. Makes no graph. Exchanges run in the order
  /// of their starts, on all ranks alike.
  virtual std::unique_ptr<PendingExchange> start(
      std::vector<RankBlocks> blocks) = 0;

 private:
  int rank_;
  int size_;
  ContextParallelPtr hosts_;
};

/// Returns this rank's part of a tensor with a row for each token.
/// @param x  [n, ...]
/// @return   [n / num_ranks, ...], a view where the rows are adjacent; x itself
///   for null `ranks`.
/// @throws Error{usage} when the ranks do not divide n, or over hosts when
///   twice the hosts do not.
at::Tensor own_rows(const ContextParallelPtr& ranks, const at::Tensor& x);

/// Sums x over the ranks of each host in rank order, then over the hosts in
/// their order, on all of them. Makes no graph. Only for small tensors, since
/// all addends are exchanged.
/// @return  x itself for null `ranks`.
at::Tensor sum_over_ranks(const ContextParallelPtr& ranks, const at::Tensor& x);

/// Returns the number of groups in which `attend_shared_tokens` exchanges the
/// heads of a rank: 2 where keys and values can be split, otherwise 1.
inline std::int64_t num_head_groups(
    std::int64_t kv_heads,
    std::int64_t num_ranks) {
  return kv_heads % (2 * num_ranks) == 0 ? 2 : 1;
}

/// Heads that a call of attention computes, with all tokens of the host.
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

/// Causal attention of tokens that hosts share. A rank has the tokens of its
/// host (TokenPart::of_host), of some heads. It all-gathers their keys and
/// values from the ranks with the same heads on the other hosts. Then it
/// computes attention of its two chunks.
///
/// The backward all-gathers keys and values again, since they are not stored.
/// It sends their gradients in float32 to the hosts of the tokens. There they
/// are added in the order of hosts. The kernels of chunks round them before.
/// The two calls for the chunks are one autograd node, so a part that keeps
/// attention (KeptTensors) runs neither them nor the all-gather again.
///
/// @param hosts      ContextParallel::hosts
/// @param q          [batch, seq / hosts, heads, head_dim]
/// @param k, v       [batch, seq / hosts, kv_heads, head_dim]
/// @param documents  of all tokens, in the order of the sequence. Undefined:
///   each row is one.
/// @return           [batch, seq / hosts, heads * head_dim]
/// @throws Error{usage} for other shapes; Error{config} naming `plain` on GPUs
///   where no kernel fits.
at::Tensor attend_over_hosts(
    const ContextParallelPtr& hosts,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const Documents& documents,
    const AttentionArgs& args);

}  // namespace flatshard::nn
