#pragma once

#include "flatshard/device/graph.h"

#include <memory>

namespace flatshard {

class FlightRecorder;

/// Returns a pool for graphs that contain collectives: the recorder counts
/// these at each replay, and a verdict drops the graphs, because NCCL's abort
/// would otherwise wait forever. A replay after that throws the verdict.
///
/// @param pool    on a GPU. A CPU's graph runs its collectives one by one.
/// @param flight  null: no watcher, and the result is `pool`.
std::shared_ptr<GraphPool> watch_collectives(
    std::shared_ptr<GraphPool> pool,
    at::Device device,
    const std::shared_ptr<FlightRecorder>& flight);

}  // namespace flatshard
