#include "flatshard/peer/peer_communicator.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "flatshard/comm/forwarding_communicator.h"
#include "flatshard/peer/copy_reducer.h"
#include "flatshard/peer/peer_backend.h"

namespace flatshard {
namespace {

class PeerCommunicator : public ForwardingCommunicator {
 public:
  PeerCommunicator(
      std::shared_ptr<Communicator> group,
      const PeerCommunicatorOptions& options)
      : ForwardingCommunicator(group, group->name() + ".peer") {
    if (device().is_cuda()) {
      fence_ = detail::make_cuda_peer_fence(*group_);
    }
    if (options.reductions_nbytes > 0) {
      reducer_ = std::make_unique<CopyReducer>(
          *group_,
          options.reductions_nbytes,
          options.stream);
    }
  }

  void restart() override {
    if (reducer_ != nullptr) {
      reducer_->restart();
    }
  }

  std::int64_t nbytes() const override {
    return reducer_ == nullptr ? 0 : reducer_->nbytes();
  }

 protected:
  void do_reduce_scatter(Tensors outs, Tensors ins, ReduceOp op) override {
    if (reducer_ == nullptr ||
        !std::all_of(ins.begin(), ins.end(), CopyReducer::supports)) {
      ForwardingCommunicator::do_reduce_scatter(
          std::move(outs),
          std::move(ins),
          op);
      return;
    }
    for (std::size_t i = 0; i < ins.size(); ++i) {
      reducer_->reduce_scatter(outs[i], ins[i], op, [this] { do_fence(); });
    }
  }

  void do_fence() override {
    if (fence_ != nullptr) {
      fence_->fence();
    } else {
      ForwardingCommunicator::do_fence();
    }
  }

  // Streams that wait in a fence would delay the group's own abort.
  void do_abort() override {
    if (fence_ != nullptr) {
      fence_->release();
    }
  }

 private:
  std::unique_ptr<PeerFence> fence_;      ///< null: the group fences
  std::unique_ptr<CopyReducer> reducer_;  ///< null: the group reduces
};

}  // namespace

std::shared_ptr<Communicator> make_peer_communicator(
    std::shared_ptr<Communicator> group,
    const PeerCommunicatorOptions& options) {
  if (group->size() == 1) {
    return group;
  }
  return std::make_shared<PeerCommunicator>(std::move(group), options);
}

}  // namespace flatshard
