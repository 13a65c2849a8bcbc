#pragma once

#include "flatshard/comm/mesh.h"
#include "flatshard/device/stream.h"
#include "flatshard/layout/strategy.h"

#include <cstdint>

namespace flatshard {

/// Every group of ranks over which gradients of this strategy are
/// reduce-scattered does so by copies from now on, through about `nbytes` of
/// memory on each rank; see Communicator::reduce_by_copies. Collective.
void reduce_by_copies(
    Mesh& mesh,
    const Strategy& strategy,
    std::int64_t nbytes,
    StreamOptions stream = {});

}  // namespace flatshard
