#include "flatshard/peer/peer_communicator.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "flatshard/peer/backend.h"
#include "flatshard/peer/copy_reducer.h"

namespace flatshard {
namespace {

class PeerCommunicator : public Communicator {
 public:
  PeerCommunicator(
      std::shared_ptr<Communicator> group,
      const PeerCommunicatorOptions& options)
      : Communicator(
            group->rank(),
            group->size(),
            group->name() + ".peer",
            group->device()),
        group_(std::move(group)) {
    share_launch_order(*group_);
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
  void do_all_gather(Tensors outs, Tensors ins) override {
    all_gather_of(*group_, std::move(outs), std::move(ins));
  }

  void do_reduce_scatter(Tensors outs, Tensors ins, ReduceOp op) override {
    if (reducer_ == nullptr ||
        !std::all_of(ins.begin(), ins.end(), CopyReducer::takes)) {
      reduce_scatter_of(*group_, std::move(outs), std::move(ins), op);
      return;
    }
    for (std::size_t i = 0; i < ins.size(); ++i) {
      reducer_->reduce_scatter(outs[i], ins[i], op, [this] { do_fence(); });
    }
  }

  void do_all_reduce(at::Tensor inout, ReduceOp op) override {
    all_reduce_of(*group_, std::move(inout), op);
  }

  void do_broadcast(at::Tensor tensor, int root) override {
    broadcast_of(*group_, std::move(tensor), root);
  }

  void do_all_to_all(at::Tensor out, at::Tensor in, Parts receives, Parts sends)
      override {
    all_to_all_of(
        *group_,
        std::move(out),
        std::move(in),
        std::move(receives),
        std::move(sends));
  }

  void do_barrier() override { barrier_of(*group_); }

  void do_fence() override {
    if (fence_ != nullptr) {
      fence_->fence();
    } else {
      fence_of(*group_);
    }
  }

  // Streams that wait in a fence would hold up the group's own abort.
  void do_abort() override {
    if (fence_ != nullptr) {
      fence_->release();
    }
  }

  std::vector<IssuedCollective> find_mismatch(
      const IssuedCollective& mine) override {
    return mismatch_of(*group_, mine);
  }

 private:
  std::shared_ptr<Communicator> group_;
  std::unique_ptr<PeerFence> fence_;      ///< null: the group's
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
