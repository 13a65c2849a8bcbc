#pragma once

#include "flatshard/device/graph_audit.h"

#include <cuda_runtime_api.h>

namespace flatshard::detail {

/// Inspects the parameters of each kernel, copy and fill of `graph`, and of
/// graphs inside it.
/// @throws Error{cuda} when the driver is older than CUDA 12.4.
GraphAudit audit_graph(cudaGraph_t graph, const GraphMemory& memory);

}  // namespace flatshard::detail
