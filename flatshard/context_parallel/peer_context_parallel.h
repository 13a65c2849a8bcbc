#pragma once

#include "flatshard/comm/communicator.h"
#include "flatshard/context_parallel/measured_waits.h"
#include "flatshard/device/stream.h"
#include "flatshard/nn/parallel/context_parallel.h"
#include "flatshard/peer/peer_memory.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace flatshard {

struct PeerContextParallelOptions {
  /// Bytes that a rank sends to all ranks in the largest exchange. Allocates
  /// twice this size. A larger exchange makes the windows again, and the host
  /// waits for that. Equal on all ranks.
  std::int64_t window_nbytes = 0;
  /// Options of the stream that copies.
  StreamOptions stream;
  /// See ContextParallel.
  nn::ContextParallelPtr hosts = nullptr;
};

/// Context parallelism by peer-to-peer copies through shared memory (on GPUs by
/// the copy engines). The results are bitwise identical to collectives.
///
/// Each rank has a window. A rank packs blocks that are not contiguous into its
/// window, and its peers read them there. It copies contiguous blocks to its
/// peers' windows, and they unpack them. So a block is copied twice, as by a
/// collective without its packing. A rank's own block is copied once, by
/// compute.
///
/// All of this runs on one stream, with one fence for an exchange: it separates
/// writing windows from reading them. Exchanges alternate between the two
/// halves of a window. So past a fence all peers have read the half that the
/// exchange before this one used.
///
/// The counts of fences do not repeat, so CUDA graphs cannot record exchanges.
class PeerContextParallel : public nn::ContextParallel {
 public:
  /// Collective.
  /// @param group  for nothing else; its fences are used, so give it
  ///   make_peer_communicator's on GPUs.
  /// @throws Error{config, memory} as PeerMemory::create.
  PeerContextParallel(
      std::shared_ptr<Communicator> group,
      const PeerContextParallelOptions& options = {});

  /// Returns the bytes of the windows of a rank.
  static std::int64_t windows_nbytes(std::int64_t window_nbytes);

  /// @throws Error{usage} where a CUDA graph is recorded.
  std::unique_ptr<nn::PendingExchange> start(
      std::vector<nn::RankBlocks> blocks) override;
  void measure(bool measures) override {
    ContextParallel::measure(measures);
    waits_.measure(measures);
  }
  double wait_and_take_exposed_ms() override {
    return waits_.wait_and_take_ms() +
           ContextParallel::wait_and_take_exposed_ms();
  }

  std::int64_t nbytes() const override {
    return windows_ ? windows_->local().numel() : 0;
  }

 private:
  class Pending;

  /// Selects the next half of the windows, for a number of bytes.
  void begin_exchange(std::int64_t nbytes);
  /// Collective.
  void make_windows(std::int64_t half_nbytes);
  /// Views bytes of the window of rank `rank`, in this exchange's half.
  /// @param like  has the dtype and the sizes
  at::Tensor place(int rank, std::int64_t begin, const at::Tensor& like) const;
  void submit_fence();

  std::shared_ptr<Communicator> group_;
  std::shared_ptr<Stream> stream_;
  MeasuredWaits waits_;
  std::unique_ptr<PeerMemory> windows_;  ///< null: none is needed yet
  std::int64_t half_nbytes_ = 0;
  int half_ = 0;  ///< used by the last exchange
};

}  // namespace flatshard
