#pragma once

#include <memory>
#include <string>

#include "flatshard/comm/communicator.h"

namespace flatshard {

/// Passes every collective on to another communicator of the same ranks without
/// its log and observer. A derived class overrides what it does itself. An
/// abort does not reach the other communicator.
class ForwardingCommunicator : public Communicator {
 protected:
  ForwardingCommunicator(std::shared_ptr<Communicator> group, std::string name);

  void do_all_gather(Tensors outs, Tensors ins) override;
  void do_reduce_scatter(Tensors outs, Tensors ins, ReduceOp op) override;
  void do_all_reduce(at::Tensor inout, ReduceOp op) override;
  void do_broadcast(at::Tensor tensor, int root) override;
  void do_all_to_all(at::Tensor out, at::Tensor in, Parts receives, Parts sends)
      override;
  void do_barrier() override;
  void do_fence() override;
  std::vector<IssuedCollective> find_mismatch(
      const IssuedCollective& mine) override;

  const std::shared_ptr<Communicator> group_;
};

}  // namespace flatshard
