#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "flatshard/device/stream.h"
#include "flatshard/layout/strategy.h"
#include "flatshard/mesh/mesh.h"

namespace flatshard {

/// Parameters that are stored on `mesh` by `strategy`.
struct PeerUse {
  std::shared_ptr<Mesh> mesh;
  Strategy strategy;
};

struct PeerMeshOptions {
  /// Weights are all-gathered through PeerBuffers, and these fence.
  bool gathers = false;
  /// Gradients are reduce-scattered by copies through about this many bytes on
  /// each rank, for each group of ranks that reduce-scatters; 0: they are not.
  std::int64_t reductions_nbytes = 0;
  StreamOptions stream;
};

/// Returns the sets of axes over which gradients are reduce-scattered: at once,
/// or by way of the inner axes.
std::vector<std::vector<int>> scattered_axes(const Strategy& strategy);

/// `mesh` with the all-gathers and reductions of these strategies through
/// memory that the ranks share: make_peer_communicator for each such group.
/// `mesh` itself and its users are unchanged. Collective.
/// @throws Error{config, memory} as PeerMemory::create.
std::shared_ptr<Mesh> with_peer_memory(
    std::shared_ptr<Mesh> mesh,
    std::span<const PeerUse> uses,
    PeerMeshOptions options);

}  // namespace flatshard
