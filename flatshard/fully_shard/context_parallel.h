#pragma once

#include "flatshard/device/stream.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/nn/parallel/context_parallel.h"

#include <string>

namespace flatshard {

struct ContextParallelOptions {
  /// Options of the stream of exchanges.
  StreamOptions stream;
};

/// Returns the ranks along an axis of the mesh that share the tokens of a
/// batch, in the form that attention accepts; null for an axis of one rank.
/// Collective.
/// @throws Error{usage} for a mesh without the axis.
nn::ContextParallelPtr make_context_parallel(
    Mesh& mesh,
    const std::string& axis = "cp",
    const ContextParallelOptions& options = {});

}  // namespace flatshard
