#pragma once

#include "flatshard/comm/communicator.h"
#include "flatshard/mesh/mesh.h"

#include <memory>
#include <span>

namespace flatshard {

/// Makes the mesh watch a communicator for exchanges over these axes. An abort
/// of the mesh aborts it, too. Collective.
void watch_exchange(
    Mesh& mesh,
    std::span<const int> axes,
    std::shared_ptr<Communicator> communicator);

/// Returns a communicator over these axes with fences for copies between ranks.
/// On GPUs make_peer_communicator makes it. Collective.
/// @throws Error{config, memory} as PeerMemory::create.
std::shared_ptr<Communicator> copy_fences(
    Mesh& mesh,
    std::span<const int> axes);

}  // namespace flatshard
