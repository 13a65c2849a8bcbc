#include "flatshard/exchange/peer_tensor_parallel.h"

#include "flatshard/comm/sum_rows.h"
#include "flatshard/core/error.h"
#include "flatshard/device/memory.h"
#include "flatshard/device/stream_word.h"
#include "flatshard/exchange/stream_use.h"

#include <ATen/ATen.h>
#include <ATen/ceil_div.h>

#include <utility>
#include <vector>

namespace flatshard {
namespace {

// So that halves and rows begin where wide loads can.
constexpr std::int64_t kWindowAlignment = 256;

}  // namespace

class PeerTensorParallel::Gather : public nn::PendingGather {
 public:
  Gather(PeerTensorParallel& ranks, const at::Tensor& part)
      : ranks_(ranks), part_(part), arrived_(ranks.size()) {
    std::vector<std::int64_t> sizes = part.sizes().vec();
    sizes.at(0) *= ranks.size();
    const auto nbytes = static_cast<std::int64_t>(part.nbytes());
    ranks.begin_transfer(ranks.size() * nbytes);
    whole_ = at::empty(sizes, part.options());
    ranks.wait_for_compute();
    ranks.submit_copy(ranks.window(ranks.rank()), part);
    ranks.submit_fence();
    // The ranks begin with the one before each, so that no two read from one.
    for (int i = 1; i <= ranks.size(); ++i) {
      const int rank = (ranks.rank() - i + ranks.size()) % ranks.size();
      auto* const to = static_cast<char*>(whole_.data_ptr()) + rank * nbytes;
      const void* const from =
          rank == ranks.rank() ? part.const_data_ptr() : ranks.window(rank);
      ranks.stream_->submit([to, from, nbytes, device = part.device()] {
        copy_bytes(to, from, nbytes, device);
      });
      arrived_[rank].record(*ranks.stream_);
    }
    use_.until_now(ranks.stream_);
  }

  at::Tensor part(int rank) override {
    if (rank == ranks_.rank()) {
      return part_;
    }
    arrived_[rank].wait(*current_stream(whole_.device()));
    const std::int64_t n = part_.size(0);
    return whole_.narrow(0, rank * n, n);
  }

  at::Tensor finish() override {
    use_.wait();
    part_ = at::Tensor();
    return std::move(whole_);
  }

 private:
  PeerTensorParallel& ranks_;
  at::Tensor part_;
  at::Tensor whole_;
  std::vector<Event> arrived_;  ///< by rank
  StreamUse use_;
};

class PeerTensorParallel::Scatter : public nn::PendingScatter {
 public:
  Scatter(PeerTensorParallel& ranks, std::vector<at::Tensor> addends)
      : ranks_(ranks), addends_(std::move(addends)), left_(ranks.size()) {
    const at::Tensor& own = addends_[ranks.rank()];
    const std::int64_t row =
        at::round_up(static_cast<std::int64_t>(own.nbytes()), kWindowAlignment);
    ranks.begin_transfer(ranks.size() * row);
    for (int r = 0; r < ranks.size(); ++r) {
      windows_.push_back(ranks.window(r) + row * ranks.rank());
    }
    const at::Tensor here = ranks.windows_->local();
    arriving_ = here.narrow(
                        0,
                        ranks.window(ranks.rank()) -
                            static_cast<const char*>(here.const_data_ptr()),
                        ranks.size() * row)
                    .view(own.scalar_type())
                    .view({ranks.size(), -1})
                    .narrow(1, 0, own.numel());
    sum_ = at::empty(own.sizes(), own.options());
    use_.until_now(ranks.stream_);
  }

  at::Tensor addend(int rank) override { return addends_[rank]; }

  void send(int rank) override {
    ranks_.wait_for_compute();
    if (rank != ranks_.rank()) {
      ranks_.submit_copy(windows_[rank], addends_[rank]);
      ++num_sent_;
    }
    --left_;
    if (num_sent_ == ranks_.size() - 1 && !fenced_) {
      ranks_.submit_fence();
      fenced_ = true;
    }
    if (left_ == 0) {
      ranks_.stream_->submit([sum = sum_.view({-1}),
                              own = addends_[ranks_.rank()].view({-1}),
                              rows = arriving_,
                              rank = ranks_.rank()] {
        sum_rows(sum, rows, rank, own, ReduceOp::sum);
      });
      use_.until_now(ranks_.stream_);
    }
  }

  at::Tensor finish() override {
    use_.wait();
    addends_.clear();
    return std::move(sum_);
  }

 private:
  PeerTensorParallel& ranks_;
  std::vector<at::Tensor> addends_;  ///< of this rank, by rank
  std::vector<char*> windows_;       ///< for them, by rank
  at::Tensor arriving_;              ///< [size, numel] of peers' addends
  at::Tensor sum_;
  int left_;          ///< addends to be sent
  int num_sent_ = 0;  ///< to peers
  bool fenced_ = false;
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
    make_windows(options.window_nbytes);
  }
}

void PeerTensorParallel::make_windows(std::int64_t nbytes) {
  half_nbytes_ = at::round_up(nbytes, kWindowAlignment);
  windows_ = PeerMemory::create(*group_, 2 * half_nbytes_);
}

void PeerTensorParallel::begin_transfer(std::int64_t nbytes) {
  FLATSHARD_CHECK(
      !current_stream_records(group_->device()),
      usage,
      "tensor parallelism by copies: expected no CUDA graph to be recorded, "
      "since a replay repeats no fence; use collectives "
      "(parallelism.tensor_parallel_comm)");
  // The same on all ranks. Peers read the old windows until all ranks have
  // come here.
  if (!windows_ || nbytes > half_nbytes_) {
    stream_->synchronize();
    make_windows(nbytes);
  }
  half_ = 1 - half_;
}

char* PeerTensorParallel::window(int rank) const {
  return static_cast<char*>(windows_->of(rank).data_ptr()) +
         half_ * half_nbytes_;
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
  return start_reduce_scatter(addend)->finish();
}

std::unique_ptr<nn::PendingTensor> PeerTensorParallel::start_all_gather(
    const at::Tensor& part) {
  return start_gather_of_parts(part);
}

std::unique_ptr<nn::PendingTensor> PeerTensorParallel::start_reduce_scatter(
    const at::Tensor& addend) {
  auto scatter = std::make_unique<Scatter>(*this, addend.chunk(size(), 0));
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
  return std::make_unique<Scatter>(*this, std::move(addends));
}

}  // namespace flatshard
