#include "flatshard/comm/forwarding_communicator.h"

#include <utility>

namespace flatshard {

ForwardingCommunicator::ForwardingCommunicator(
    std::shared_ptr<Communicator> group,
    std::string name)
    : Communicator(
          group->rank(),
          group->size(),
          std::move(name),
          group->device()),
      group_(std::move(group)) {
  share_launch_order(*group_);
}

void ForwardingCommunicator::do_all_gather(Tensors outs, Tensors ins) {
  group_->do_all_gather(std::move(outs), std::move(ins));
}

void ForwardingCommunicator::do_reduce_scatter(
    Tensors outs,
    Tensors ins,
    ReduceOp op) {
  group_->do_reduce_scatter(std::move(outs), std::move(ins), op);
}

void ForwardingCommunicator::do_all_reduce(at::Tensor inout, ReduceOp op) {
  group_->do_all_reduce(std::move(inout), op);
}

void ForwardingCommunicator::do_broadcast(at::Tensor tensor, int root) {
  group_->do_broadcast(std::move(tensor), root);
}

void ForwardingCommunicator::do_all_to_all(
    at::Tensor out,
    at::Tensor in,
    Parts receives,
    Parts sends) {
  group_->do_all_to_all(
      std::move(out),
      std::move(in),
      std::move(receives),
      std::move(sends));
}

void ForwardingCommunicator::do_barrier() {
  group_->do_barrier();
}

void ForwardingCommunicator::do_fence() {
  group_->do_fence();
}

std::vector<IssuedCollective> ForwardingCommunicator::find_mismatch(
    const IssuedCollective& mine) {
  return group_->find_mismatch(mine);
}

}  // namespace flatshard
