#include "flatshard/tensor_parallel/peer_tensor_parallel.h"

#include "flatshard/comm/sum_rows.h"
#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/device/memory.h"
#include "flatshard/device/stream_use.h"
#include "flatshard/device/stream_word.h"

#include <ATen/ATen.h>

#include <utility>
#include <vector>

namespace flatshard {
namespace {

// Aligns halves and rows for wide loads.
constexpr std::int64_t kWindowAlignment = 256;

/// Returns the bytes of a rank in a window.
std::int64_t row_nbytes(std::int64_t window_nbytes, std::int64_t ranks) {
  return round_up(ceil_div(window_nbytes, ranks), kWindowAlignment);
}

}  // namespace

std::int64_t PeerTensorParallel::windows_nbytes(
    std::int64_t window_nbytes,
    std::int64_t ranks) {
  return 2 * ranks * row_nbytes(window_nbytes, ranks);
}

class PeerTensorParallel::Gather : public nn::PendingGather {
 public:
  Gather(PeerTensorParallel& ranks, const at::Tensor& part)
      : ranks_(ranks), part_(part), fences_(ranks.size()) {
    const auto nbytes = static_cast<std::int64_t>(part.nbytes());
    const std::int64_t row = ranks.begin_transfer(nbytes);
    arriving_ = ranks.rows_in_window(row, part);
    std::vector<std::int64_t> sizes = part.sizes().vec();
    sizes.at(0) *= ranks.size();
    whole_ = at::empty(sizes, part.options());
    ranks.wait_for_compute();
    // Each rank starts with the next rank, so that no two write to one peer.
    for (int i = 1; i < ranks.size(); ++i) {
      const int to = (ranks.rank() + i) % ranks.size();
      ranks.submit_copy(ranks.window(to) + row * ranks.rank(), part);
      ranks.submit_fence();
      fences_[i].record(*ranks.stream_);
    }
    for (int rank = 0; rank < ranks.size(); ++rank) {
      ranks.submit_copy(
          static_cast<char*>(whole_.data_ptr()) + rank * nbytes,
          rank == ranks.rank() ? part : arriving_[rank]);
    }
    use_.until_now(ranks.stream_);
  }

  at::Tensor part(int rank) override {
    const int i = (ranks_.rank() - rank + ranks_.size()) % ranks_.size();
    fences_[i].wait(*current_stream(whole_.device()));
    return i == 0 ? part_ : arriving_[rank].view(part_.sizes());
  }

  at::Tensor finish() override {
    use_.wait();
    part_ = at::Tensor();
    return std::move(whole_);
  }

 private:
  PeerTensorParallel& ranks_;
  at::Tensor part_;
  at::Tensor arriving_;  ///< [size, numel] of peers' parts
  at::Tensor whole_;
  /// Past number i the part has arrived of the rank that is i before this one.
  std::vector<Event> fences_;
  StreamUse use_;
};

class PeerTensorParallel::Scatter : public nn::PendingScatter {
 public:
  /// @param overlaps  compute has other work than to wait for the sum.
  Scatter(
      PeerTensorParallel& ranks,
      std::vector<at::Tensor> addends,
      bool overlaps)
      : ranks_(ranks),
        addends_(std::move(addends)),
        sum_(at::empty_like(addends_[ranks.rank()])),
        row_(ranks.begin_transfer(static_cast<std::int64_t>(sum_.nbytes()))),
        arriving_(ranks.rows_in_window(row_, sum_)),
        overlaps_(overlaps),
        left_(ranks.size()),
        left_for_peers_(ranks.size() - 1) {
    use_.until_now(ranks.stream_);
  }

  at::Tensor addend(int rank) override { return addends_[rank]; }

  void send(int rank) override {
    const int here = ranks_.rank();
    ranks_.wait_for_compute();
    if (rank != here) {
      ranks_.submit_copy(ranks_.window(rank) + row_ * here, addends_[rank]);
      if (--left_for_peers_ == 0) {
        ranks_.submit_fence();
      }
    }
    if (--left_ == 0) {
      ranks_.stream_->submit(
          [sum = sum_.view({-1}),
           own = addends_[here].view({-1}),
           rows = arriving_,
           here,
           overlaps = overlaps_] { add_up(sum, own, rows, here, overlaps); });
      use_.until_now(ranks_.stream_);
    }
  }

  at::Tensor finish() override {
    use_.wait();
    addends_.clear();
    return std::move(sum_);
  }

 private:
  // The order of two addends does not matter, and ATen's kernel uses all of the
  // GPU (sum_rows does not).
  static void add_up(
      at::Tensor sum,
      const at::Tensor& own,
      const at::Tensor& rows,
      int rank,
      bool overlaps) {
    if (rows.size(0) == 2 && !overlaps) {
      at::add_out(sum, own, rows[1 - rank]);
    } else {
      sum_rows(sum, rows, rank, own, ReduceOp::sum);
    }
  }

  PeerTensorParallel& ranks_;
  std::vector<at::Tensor> addends_;  ///< of this rank, by rank
  at::Tensor sum_;
  std::int64_t row_;     ///< bytes from one addend to the next in a window
  at::Tensor arriving_;  ///< [size, numel] of peers' addends
  bool overlaps_;
  int left_;            ///< addends to be sent
  int left_for_peers_;  ///< addends to be sent to peers
  StreamUse use_;
};

PeerTensorParallel::PeerTensorParallel(
    std::shared_ptr<Communicator> group,
    const PeerTensorParallelOptions& options)
    : TensorParallel(group->rank(), group->size()), group_(std::move(group)) {
  StreamOptions stream = options.stream;
  stream.high_priority = true;
  stream_ = make_stream(group_->device(), "tensor parallelism", stream);
  if (options.window_nbytes > 0) {
    make_windows(row_nbytes(options.window_nbytes, size()));
  }
}

void PeerTensorParallel::make_windows(std::int64_t row_nbytes) {
  half_nbytes_ = size() * row_nbytes;
  windows_ = PeerMemory::create(*group_, 2 * half_nbytes_);
}

std::int64_t PeerTensorParallel::begin_transfer(std::int64_t nbytes) {
  FLATSHARD_CHECK(
      !current_stream_records(group_->device()),
      usage,
      "tensor parallelism by copies: expected no CUDA graph to be recorded, "
      "since a replay repeats no fence; use collectives "
      "(parallelism.tensor_parallel_comm)");
  const std::int64_t row = round_up(nbytes, kWindowAlignment);
  // The same on all ranks. Compute reads the old windows, and peers write to
  // them until all ranks have come here.
  if (!windows_ || size() * row > half_nbytes_) {
    wait_for_compute();
    stream_->synchronize();
    make_windows(row);
  }
  half_ = 1 - half_;
  return row;
}

char* PeerTensorParallel::window(int rank) const {
  return static_cast<char*>(windows_->of(rank).data_ptr()) +
         half_ * half_nbytes_;
}

at::Tensor PeerTensorParallel::rows_in_window(
    std::int64_t row,
    const at::Tensor& like) const {
  return windows_->local()
      .narrow(0, half_ * half_nbytes_, size() * row)
      .view(like.scalar_type())
      .view({size(), -1})
      .narrow(1, 0, like.numel());
}

void PeerTensorParallel::wait_for_compute() {
  Event ready;
  ready.record(*current_stream(group_->device()));
  ready.wait(*stream_);
}

void PeerTensorParallel::submit_fence() {
  Communicator* const group = group_.get();
  queue_collectives(*stream_, {&group, 1}, [group] { group->fence(); });
}

void PeerTensorParallel::submit_copy(void* to, const at::Tensor& from) {
  stream_->submit([to, from] {
    copy_bytes(
        to,
        from.const_data_ptr(),
        static_cast<std::int64_t>(from.nbytes()),
        from.device());
  });
}

at::Tensor PeerTensorParallel::all_gather(const at::Tensor& part) {
  return start_gather_of_parts(part)->finish();
}

at::Tensor PeerTensorParallel::reduce_scatter(const at::Tensor& addend) {
  return send_all(addend, /*overlaps=*/false)->finish();
}

std::unique_ptr<nn::PendingTensor> PeerTensorParallel::start_all_gather(
    const at::Tensor& part) {
  return start_gather_of_parts(part);
}

std::unique_ptr<nn::PendingTensor> PeerTensorParallel::start_reduce_scatter(
    const at::Tensor& addend) {
  return send_all(addend, /*overlaps=*/true);
}

std::unique_ptr<nn::PendingTensor> PeerTensorParallel::send_all(
    const at::Tensor& addend,
    bool overlaps) {
  auto scatter =
      std::make_unique<Scatter>(*this, addend.chunk(size(), 0), overlaps);
  for (int i = 1; i <= size(); ++i) {
    scatter->send((rank() + i) % size());
  }
  return scatter;
}

std::unique_ptr<nn::PendingGather> PeerTensorParallel::start_gather_of_parts(
    const at::Tensor& part) {
  return std::make_unique<Gather>(*this, part);
}

std::unique_ptr<nn::PendingScatter> PeerTensorParallel::start_scatter_of_parts(
    at::IntArrayRef sizes,
    const at::TensorOptions& options) {
  std::vector<at::Tensor> addends;
  for (int r = 0; r < size(); ++r) {
    addends.push_back(at::empty(sizes, options));
  }
  return std::make_unique<Scatter>(
      *this,
      std::move(addends),
      /*overlaps=*/false);
}

}  // namespace flatshard
