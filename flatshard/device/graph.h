#pragma once

#include "flatshard/device/graph_audit.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace flatshard {

/// Device work that was recorded once and is launched as one unit.
///
/// CUDA: an executable CUDA graph. Capture executes nothing: kernels are
/// recorded with the addresses that their tensors have, so inputs may be filled
/// later. A replay costs the host one launch and goes to the current stream.
/// CPU: the function itself. Each replay runs it again into the same output
/// tensors; for tests of what is built on graphs.
class DeviceGraph {
 public:
  /// The work that is recorded. Its tensors are the graph's outputs. Some may
  /// be undefined.
  using Work = std::function<std::vector<at::Tensor>()>;

  virtual ~DeviceGraph() = default;
  /// Returns the tensors that each replay writes: same addresses every time.
  virtual const std::vector<at::Tensor>& outputs() const = 0;
  /// Queues the work on the current stream.
  virtual void replay() = 0;
  /// Inspects the addresses in the graph's kernels. CPU: does nothing.
  /// @param declared  memory outside the pool that they may touch.
  /// @throws Error{usage} when the pool is not for audits.
  virtual GraphAudit audit(const std::vector<at::Tensor>& declared) const = 0;
};

/// The memory that graphs share. Tensors that a capture keeps (its outputs,
/// autograd's saved tensors) keep their place during later captures. Memory
/// that was freed within a capture serves the next one, also for the tensors
/// that it keeps. So replays of one pool must not overlap in time, and a
/// replay overwrites the results of graphs captured later: a program that
/// replays in another order than the captures' makes sure that those are no
/// longer read.
class GraphPool {
 public:
  virtual ~GraphPool() = default;
  /// Records `work`. It rethrows exceptions of `work`, and errors of the device
  /// at the end of the recording. The pool and the device stay usable then.
  /// @param generators  that `work` draws from in addition to the device's
  ///   default one. A replay draws what the same work would have drawn at its
  ///   place.
  virtual std::unique_ptr<DeviceGraph> capture(
      DeviceGraph::Work work,
      const std::vector<at::Generator>& generators = {}) = 0;
  /// Frees the unused memory that the device's allocator caches. Call it before
  /// the first of several captures: their memory is not part of it.
  virtual void make_room() = 0;
  /// Returns the bytes that the graphs allocated on the device, freed ones
  /// included.
  virtual std::int64_t nbytes() const = 0;
};

/// @param audited  its graphs keep their nodes, for DeviceGraph::audit.
/// @throws Error{config} for CUDA in a build without it.
std::shared_ptr<GraphPool> make_graph_pool(
    at::Device device,
    bool audited = false);

}  // namespace flatshard
