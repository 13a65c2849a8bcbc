// Stands in for cuda_*.cpp in a build without CUDA.
#include "flatshard/core/error.h"
#include "flatshard/peer/peer_backend.h"

namespace flatshard::detail {

bool cuda_peers_are_linked(Communicator& /*group*/) {
  return false;
}

std::unique_ptr<PeerMemory> make_cuda_peer_memory(
    Communicator& group,
    std::int64_t /*nbytes*/) {
  FLATSHARD_THROW(
      config,
      "communicator '{}': device '{}' requires CUDA, and this build has none; "
      "build with -DFLATSHARD_CUDA=on",
      group.name(),
      group.device().str());
}

std::unique_ptr<PeerFence> make_cuda_peer_fence(Communicator& /*group*/) {
  return nullptr;
}

}  // namespace flatshard::detail
