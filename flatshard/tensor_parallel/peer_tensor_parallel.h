#pragma once

#include "flatshard/comm/communicator.h"
#include "flatshard/device/stream.h"
#include "flatshard/nn/parallel/tensor_parallel.h"
#include "flatshard/peer/peer_memory.h"

#include <cstdint>
#include <memory>

namespace flatshard {

struct PeerTensorParallelOptions {
  /// Bytes of the largest tensor of all ranks' tokens. Allocates twice this
  /// size. A larger tensor makes the windows again, and the host waits for
  /// that. Equal on all ranks.
  std::int64_t window_nbytes = 0;
  /// Options of the stream that copies.
  StreamOptions stream;
};

/// Tensor parallelism by peer-to-peer copies through shared memory (on GPUs by
/// the copy engines). Parts are copied one by one, so that matmuls of some
/// parts overlap copies of others.
///
/// Each rank has a window, to which its peers copy their parts of an all-gather
/// and their addends of a reduce-scatter. It sums the addends in rank order,
/// float16 and bfloat16 in float32 with one rounding.
///
/// All copies run on one stream. A fence separates writing windows from reading
/// them: an all-gather has one for each peer, a reduce-scatter has one.
/// Transfers alternate between the two halves of a window, and a transfer
/// starts after what compute has queued. So past its fence all peers have read
/// the data that the transfer before left in the other half.
///
/// The counts of fences do not repeat, so CUDA graphs cannot record transfers.
class PeerTensorParallel : public nn::TensorParallel {
 public:
  /// Collective.
  /// @param group  for nothing else; its fences are used, so give it
  ///   make_peer_communicator's on GPUs.
  /// @throws Error{config, memory} as PeerMemory::create.
  PeerTensorParallel(
      std::shared_ptr<Communicator> group,
      const PeerTensorParallelOptions& options = {});

  /// Returns the bytes of windows on each of `ranks` ranks, of
  /// PeerTensorParallelOptions::window_nbytes.
  static std::int64_t windows_nbytes(
      std::int64_t window_nbytes,
      std::int64_t ranks);

  // All throw Error{usage} where a CUDA graph is recorded.
  at::Tensor all_gather(const at::Tensor& part) override;
  at::Tensor reduce_scatter(const at::Tensor& addend) override;
  std::unique_ptr<nn::PendingTensor> start_all_gather(
      const at::Tensor& part) override;
  std::unique_ptr<nn::PendingTensor> start_reduce_scatter(
      const at::Tensor& addend) override;
  std::unique_ptr<nn::PendingGather> start_gather_of_parts(
      const at::Tensor& part) override;
  std::unique_ptr<nn::PendingScatter> start_scatter_of_parts(
      at::IntArrayRef sizes,
      const at::TensorOptions& options) override;

  std::int64_t nbytes() const override {
    return windows_ ? windows_->local().numel() : 0;
  }

 private:
  class Gather;
  class Scatter;

  /// Selects the next half of the windows for a tensor of each rank.
  /// @param nbytes  of one of these tensors
  /// @return        bytes from one to the next in a window
  std::int64_t begin_transfer(std::int64_t nbytes);
  /// Collective. @param row_nbytes  of each rank in a window
  void make_windows(std::int64_t row_nbytes);
  /// Returns the window of rank `rank`, in this transfer's half.
  char* window(int rank) const;
  /// Views this rank's window, in this transfer's half, as a row of each rank.
  /// @param row   as begin_transfer returns
  /// @param like  has the dtype and the number of elements of a row
  /// @return      [size, numel]
  at::Tensor rows_in_window(std::int64_t row, const at::Tensor& like) const;
  /// Starts a reduce-scatter of a full tensor.
  /// @param overlaps  compute has other work than to wait for the sum
  std::unique_ptr<nn::PendingTensor> send_all(
      const at::Tensor& addend,
      bool overlaps);
  /// Later copies come after what compute has queued.
  void wait_for_compute();
  void submit_fence();
  void submit_copy(void* to, const at::Tensor& from);

  std::shared_ptr<Communicator> group_;
  std::shared_ptr<Stream> stream_;
  std::unique_ptr<PeerMemory> windows_;  ///< null: none is needed yet
  std::int64_t half_nbytes_ = 0;
  int half_ = 0;  ///< used by the last transfer
};

}  // namespace flatshard
