#pragma once

#include "flatshard/comm/mesh.h"
#include "flatshard/device/stream.h"
#include "flatshard/layout/strategy.h"

#include <cstdint>

namespace flatshard {

/// What reductions by copies take, where nobody asks for another size: on eight
/// GPUs that makes pieces of 16 MiB from each to each.
inline constexpr std::int64_t kCopyReductionsNbytes = std::int64_t{256} << 20;

/// Every group of ranks over which gradients of this strategy are
/// reduce-scattered does so by copies from now on, through about `nbytes` of
/// memory on each rank; see Communicator::reduce_by_copies. Collective.
void reduce_by_copies(
    Mesh& mesh,
    const Strategy& strategy,
    std::int64_t nbytes,
    StreamOptions stream = {});

}  // namespace flatshard
