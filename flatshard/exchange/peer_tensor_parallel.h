#pragma once

#include "flatshard/comm/communicator.h"
#include "flatshard/device/stream.h"
#include "flatshard/nn/parallel/tensor_parallel.h"
#include "flatshard/peer/peer_memory.h"

#include <cstdint>
#include <memory>

namespace flatshard {

struct PeerTensorParallelOptions {
  /// Bytes of the largest tensor of all ranks' tokens. Twice as much memory is
  /// held. A larger tensor makes the windows again, which the host waits for.
  /// Equal on all ranks.
  std::int64_t window_nbytes = 0;
  /// Options of the stream that copies.
  StreamOptions stream;
};

/// Tensor parallelism by copies through memory that the ranks share, which on
/// GPUs are the copy engines'. Parts travel one by one, so that products of
/// some parts and copies of others overlap.
///
/// Each rank has a window. In an all-gather it fills its own, and its peers
/// read there. In a reduce-scatter the peers write their addends there, and it
/// sums them in rank order, float16 and bfloat16 in float32 with one rounding.
///
/// All of it runs on one stream, and each transfer has one fence, between
/// writing windows and reading them. Windows have two halves, which transfers
/// alternate between: past a fence, a rank's peers have read the data that the
/// transfer before left in the other half.
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

  /// Takes the next half of the windows for a tensor of `nbytes`.
  void begin_transfer(std::int64_t nbytes);
  /// Collective. @param nbytes  of the largest tensor
  void make_windows(std::int64_t nbytes);
  /// Returns the window of rank `rank`, in this transfer's half.
  char* window(int rank) const;
  /// Later copies come after what compute has queued.
  void wait_for_compute();
  void submit_fence();
  void submit_copy(void* to, const at::Tensor& from);

  std::shared_ptr<Communicator> group_;
  std::shared_ptr<Stream> stream_;
  std::unique_ptr<PeerMemory> windows_;  ///< null: none is needed yet
  std::int64_t half_nbytes_ = 0;
  int half_ = 0;  ///< of the last transfer
};

}  // namespace flatshard
