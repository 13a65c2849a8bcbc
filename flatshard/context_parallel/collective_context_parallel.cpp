#include "flatshard/context_parallel/collective_context_parallel.h"

#include "flatshard/context_parallel/copy_wide.h"
#include "flatshard/device/stream_use.h"

#include <ATen/ATen.h>

#include <cstdint>
#include <utility>

namespace flatshard {
namespace {

// Exchanges block r of `in` [size, n] with rank r; [1, n] is for all ranks.
void exchange_blocks(
    Communicator& group,
    const at::Tensor& out,
    const at::Tensor& in) {
  if (in.size(0) < out.size(0)) {
    group.all_gather(out.view({-1}), in.view({-1}));
    return;
  }
  std::vector<RowsOfPeer> rows;
  for (int peer = 0; peer < group.size(); ++peer) {
    rows.push_back({.peer = peer, .begin = peer, .rows = 1});
  }
  group.all_to_all(out, in, rows, rows);
}

}  // namespace

class CollectiveContextParallel::Pending : public nn::PendingExchange {
 public:
  Pending(CollectiveContextParallel& ranks, std::vector<nn::RankBlocks> blocks)
      : waits_(ranks.waits_), blocks_(std::move(blocks)) {
    const std::int64_t size = ranks.size();
    for (const nn::RankBlocks& b : blocks_) {
      sent_.push_back(packed(b.is_one ? b.send.narrow(0, 0, 1) : b.send)
                          .view({b.is_one ? 1 : size, -1}));
      const at::Tensor& to = b.receive;
      received_.push_back(
          (to.is_contiguous() ? to : at::empty(to.sizes(), to.options()))
              .view({size, -1}));
    }
    Event ready;
    ready.record(*current_stream(ranks.group_->device()));
    ready.wait(*ranks.stream_);
    Communicator* const group = ranks.group_.get();
    queue_collectives(
        *ranks.stream_,
        {&group, 1},
        [group, sent = sent_, received = received_] {
          for (std::size_t i = 0; i < sent.size(); ++i) {
            exchange_blocks(*group, received[i], sent[i]);
          }
        });
    use_.until_now(ranks.stream_);
  }

  void finish() override {
    waits_.run([&] { use_.wait(); });
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const at::Tensor& place = blocks_[i].receive;
      if (!place.is_contiguous()) {
        copy_wide(place, received_[i].view(place.sizes()));
      }
    }
  }

 private:
  MeasuredWaits& waits_;
  std::vector<nn::RankBlocks> blocks_;
  std::vector<at::Tensor> sent_;      ///< [size, n] contiguous
  std::vector<at::Tensor> received_;  ///< [size, n] contiguous
  StreamUse use_;
};

CollectiveContextParallel::CollectiveContextParallel(
    std::shared_ptr<Communicator> group,
    StreamOptions options,
    nn::ContextParallelPtr hosts)
    : ContextParallel(group->rank(), group->size(), std::move(hosts)),
      group_(std::move(group)),
      waits_(group_->device()) {
  options.high_priority = true;
  stream_ = make_stream(group_->device(), "context parallelism", options);
}

std::unique_ptr<nn::PendingExchange> CollectiveContextParallel::start(
    std::vector<nn::RankBlocks> blocks) {
  return std::make_unique<Pending>(*this, std::move(blocks));
}

}  // namespace flatshard
