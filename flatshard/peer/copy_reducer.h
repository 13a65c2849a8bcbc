#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "flatshard/device/stream.h"
#include "flatshard/peer/peer_memory.h"

namespace flatshard {

/// Reduce-scatters by copies: each rank writes every peer's slice of its input
/// into that peer's memory. It sums the slices in its own memory, in rank
/// order, float16 and bfloat16 in float32 with one rounding. On GPUs copy
/// engines move the data, and the SMs are needed only for the sum.
///
/// The input is sent in pieces that alternate between two halves of the memory.
/// A separate stream copies piece k + 1 while the caller's sums piece k. One
/// fence per piece, after its copies and after the sum of the piece before, is
/// then enough: a rank past the fence of piece k has summed piece k - 1, so its
/// half is free for piece k + 1. All calls of a rank are on one stream.
class CopyReducer {
 public:
  /// Collective.
  /// @param nbytes  of memory on each rank, about.
  /// @param stream  of the copies.
  CopyReducer(
      Communicator& group,
      std::int64_t nbytes,
      const StreamOptions& stream);

  /// Returns the bytes of memory on each of `ranks` ranks.
  /// @param nbytes  as in the constructor.
  static std::int64_t memory_nbytes(std::int64_t nbytes, std::int64_t ranks);
  /// Returns whether it can sum the dtype. Others are for the backend.
  static bool supports(const at::Tensor& in);
  std::int64_t nbytes() const { return memory_->local().numel(); }

  /// Inside Stream::submit.
  /// @param out  [n] overwritten; must not overlap `in`.
  /// @param in  [size * n] unchanged.
  /// @param fence  launches a collective of the group; called in the stream of
  ///   the copies.
  void reduce_scatter(
      const at::Tensor& out,
      const at::Tensor& in,
      ReduceOp op,
      const std::function<void()>& fence);

  /// Called after a failure, when ranks may have got to different pieces: all
  /// of them call it while their streams are idle.
  void restart();

 private:
  /// Copies `n` elements per slice, from `at` on, to half `half` of every peer.
  void copy_piece(
      const at::Tensor& in,
      std::int64_t at,
      std::int64_t n,
      int half) const;

  std::int64_t row_nbytes_;
  std::unique_ptr<PeerMemory> memory_;  ///< [2 halves][size][row_nbytes_]
  at::Tensor typed_;  ///< memory_, as the dtype of the last call
  std::shared_ptr<Stream> copies_;
  Event arrived_;  ///< in the stream of the copies: past the last fence
  Event summed_;   ///< in the stream of the caller: the last sum
  int half_ = 0;
};

}  // namespace flatshard
