#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "flatshard/comm/store.h"

namespace flatshard {

/// Rank 0 of a group of which the other ranks are another program that uses
/// torch.distributed, such as an inference engine.
///
/// It differs from a Communicator: it sends only the collectives that both
/// programs call, also when it connects.
class TorchGroup {
 public:
  virtual ~TorchGroup() = default;
  /// Connects, before the first broadcast, while the other ranks do. Gloo
  /// blocks the host; NCCL connects in the first broadcast, as it does in the
  /// other program.
  /// @throws Error{comm} on a failure, or after `abort`; Error{timeout} if the
  /// other ranks do not join until the deadline.
  virtual void join() {}
  /// Sends a contiguous tensor on the group's device to all other ranks. Blocks
  /// the host until it is sent.
  /// @throws Error{comm} if a peer is gone, or after `abort`; Error{timeout} at
  /// the deadline.
  virtual void broadcast(const at::Tensor& tensor) = 0;
  /// A call that waits fails now, and later ones at once. From any thread.
  virtual void abort() = 0;
};

struct TorchGroupOptions {
  int size = 2;      ///< with this rank
  std::string name;  ///< `group_name` in the other program
  at::Device device = at::kCPU;
  /// Until when all of its operations have to end.
  std::chrono::steady_clock::time_point deadline;
};

/// Returns the group that the other ranks join with torch.distributed: the
/// backend "gloo" on a CPU and "nccl" on a GPU, rendezvous at the TCP store
/// `store`, below the prefix of the group's name. Does not block.
/// @throws Error{config} for a GPU in a build without CUDA.
std::shared_ptr<TorchGroup> make_torch_group(
    const StoreHandle& store,
    const TorchGroupOptions& options);

}  // namespace flatshard
