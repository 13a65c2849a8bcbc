#pragma once

#include "flatshard/device/stream.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/nn/parallel/context_parallel.h"

#include <cstdint>
#include <string>

namespace flatshard {

struct ContextParallelOptions {
  /// The axis over hosts: ranks along it all-gather keys and values. Empty: the
  /// ranks of one host share tokens.
  std::string hosts;
  /// Heads are copied between ranks of one host (PeerContextParallel). CUDA
  /// graphs cannot record that. False: collectives exchange them.
  bool copies = false;
  /// The window of copies; see PeerContextParallelOptions.
  std::int64_t window_nbytes = 0;
  /// Options of the stream of exchanges.
  StreamOptions stream;
};

/// Returns the ranks along an axis of the mesh that share the tokens of a
/// batch, in the form that attention accepts; null where each rank has all of
/// its tokens. Collective.
/// @param axis  of the ranks that exchange heads
/// @throws Error{usage} for a mesh without the axes, Error{config} when ranks
///   that copy are on different hosts.
nn::ContextParallelPtr make_context_parallel(
    Mesh& mesh,
    const std::string& axis = "cp",
    const ContextParallelOptions& options = {});

}  // namespace flatshard
