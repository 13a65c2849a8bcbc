#pragma once

#include <cstdint>
#include <memory>

#include "flatshard/peer/peer_fence.h"
#include "flatshard/peer/peer_memory.h"

// cuda_*.cpp or no_cuda_peer.cpp, chosen at link time.
namespace flatshard::detail {

/// See PeerMemory::has_fast_links.
bool cuda_peers_are_linked(Communicator& group);

std::unique_ptr<PeerMemory> make_cuda_peer_memory(
    Communicator& group,
    std::int64_t nbytes);

/// PeerMemory in host memory, whatever the group's device. Collective.
std::unique_ptr<PeerMemory> make_shared_pages(
    Communicator& group,
    std::int64_t nbytes);

/// Returns null on all ranks when one's processes or driver cannot do it.
/// Collective.
std::unique_ptr<PeerFence> make_cuda_peer_fence(Communicator& group);

}  // namespace flatshard::detail
