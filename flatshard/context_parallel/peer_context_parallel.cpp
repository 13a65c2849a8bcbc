#include "flatshard/context_parallel/peer_context_parallel.h"

#include "flatshard/context_parallel/copy_wide.h"
#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/device/memory.h"
#include "flatshard/device/stream_use.h"
#include "flatshard/device/stream_word.h"

#include <ATen/ATen.h>

#include <utility>

namespace flatshard {
namespace {

// Aligns tensors in a window for wide loads.
constexpr std::int64_t kTensorAlignment = 256;

std::int64_t nbytes_in_window(const at::Tensor& x) {
  return round_up(static_cast<std::int64_t>(x.nbytes()), kTensorAlignment);
}

// Returns block `rank` of a tensor; see nn::RankBlocks.
at::Tensor block_of(const at::Tensor& x, std::int64_t rank, std::int64_t size) {
  return x.size(0) == size
             ? x.select(0, rank)
             : x.select(0, rank / x.size(1)).select(0, rank % x.size(1));
}

// Both are contiguous.
void copy_block(const at::Tensor& to, const at::Tensor& from) {
  copy_bytes(
      to.mutable_data_ptr(),
      from.const_data_ptr(),
      static_cast<std::int64_t>(from.nbytes()),
      from.device());
}

}  // namespace

class PeerContextParallel::Pending : public nn::PendingExchange {
 public:
  Pending(PeerContextParallel& ranks, std::vector<nn::RankBlocks> blocks)
      : ranks_(ranks), blocks_(std::move(blocks)) {
    std::int64_t nbytes = 0;
    for (nn::RankBlocks& b : blocks_) {
      if (!b.receive.is_contiguous()) {
        b.send = packed(b.send);
      }
      begins_.push_back(nbytes);
      nbytes += nbytes_in_window(b.send);
    }
    ranks.begin_exchange(nbytes);
    Event ready;
    ready.record(*current_stream(ranks.group_->device()));
    ready.wait(*ranks.stream_);
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      send(i);
    }
    ranks.submit_fence();
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      receive(i);
    }
    use_.until_now(ranks.stream_);
    for (const nn::RankBlocks& b : blocks_) {
      copy_wide(block(b.receive, ranks.rank()), block(b.send, ranks.rank()));
    }
  }

  void finish() override {
    ranks_.waits_.run([&] { use_.wait(); });
  }

 private:
  at::Tensor block(const at::Tensor& x, int rank) const {
    return block_of(x, rank, ranks_.size());
  }
  /// Returns the place of a block of tensor `i` in the window of rank `window`.
  at::Tensor place(std::size_t i, int window, int rank) const {
    return block(ranks_.place(window, begins_[i], blocks_[i].send), rank);
  }
  /// Each rank starts with the next rank, so that no two use one peer.
  int peer(int i) const { return (ranks_.rank() + i) % ranks_.size(); }

  void send(std::size_t i) {
    const at::Tensor& x = blocks_[i].send;
    for (int k = 1; k < ranks_.size(); ++k) {
      const at::Tensor from = block(x, peer(k));
      if (x.is_contiguous()) {
        ranks_.stream_->submit([to = place(i, peer(k), ranks_.rank()), from] {
          copy_block(to, from);
        });
      } else {
        ranks_.stream_->submit([to = place(i, ranks_.rank(), peer(k)), from] {
          copy_wide(to, from);
        });
      }
    }
  }

  void receive(std::size_t i) {
    for (int k = 1; k < ranks_.size(); ++k) {
      const at::Tensor to = block(blocks_[i].receive, peer(k));
      if (blocks_[i].send.is_contiguous()) {
        ranks_.stream_->submit([to, from = place(i, ranks_.rank(), peer(k))] {
          copy_wide(to, from);
        });
      } else {
        ranks_.stream_->submit([to, from = place(i, peer(k), ranks_.rank())] {
          copy_block(to, from);
        });
      }
    }
  }

  PeerContextParallel& ranks_;
  std::vector<nn::RankBlocks> blocks_;
  std::vector<std::int64_t> begins_;  ///< of the tensors, in a window
  StreamUse use_;
};

PeerContextParallel::PeerContextParallel(
    std::shared_ptr<Communicator> group,
    const PeerContextParallelOptions& options)
    : ContextParallel(group->rank(), group->size(), options.hosts),
      group_(std::move(group)),
      waits_(group_->device()) {
  StreamOptions stream = options.stream;
  stream.high_priority = true;
  stream_ = make_stream(group_->device(), "context parallelism", stream);
  if (options.window_nbytes > 0) {
    make_windows(round_up(options.window_nbytes, kTensorAlignment));
  }
}

std::int64_t PeerContextParallel::windows_nbytes(std::int64_t window_nbytes) {
  return 2 * round_up(window_nbytes, kTensorAlignment);
}

void PeerContextParallel::make_windows(std::int64_t half_nbytes) {
  windows_ = PeerMemory::create(*group_, 2 * half_nbytes);
  half_nbytes_ = half_nbytes;
}

void PeerContextParallel::begin_exchange(std::int64_t nbytes) {
  FLATSHARD_CHECK(
      !current_stream_records(group_->device()),
      usage,
      "context parallelism by copies: expected no CUDA graph to be recorded, "
      "since a replay repeats no fence; use collectives "
      "(parallelism.context_parallel_comm)");
  // The same on all ranks. Peers use the old windows until all ranks have come
  // here.
  if (nbytes > half_nbytes_) {
    stream_->synchronize();
    make_windows(nbytes);
  }
  half_ = 1 - half_;
}

at::Tensor PeerContextParallel::place(
    int rank,
    std::int64_t begin,
    const at::Tensor& like) const {
  return windows_->of(rank)
      .narrow(
          0,
          half_ * half_nbytes_ + begin,
          static_cast<std::int64_t>(like.nbytes()))
      .view(like.scalar_type())
      .view(like.sizes());
}

void PeerContextParallel::submit_fence() {
  Communicator* const group = group_.get();
  queue_collectives(*stream_, {&group, 1}, [group] { group->fence(); });
}

std::unique_ptr<nn::PendingExchange> PeerContextParallel::start(
    std::vector<nn::RankBlocks> blocks) {
  return std::make_unique<Pending>(*this, std::move(blocks));
}

}  // namespace flatshard
