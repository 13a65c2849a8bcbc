#pragma once

#include "flatshard/train/config.h"

namespace flatshard {

/// What graphs do not go with, and names of `cuda_graph.modules`; graph_regions
/// has the latter's.
/// @throws Error{config}.
void check_cuda_graph(const Config& config);

}  // namespace flatshard
