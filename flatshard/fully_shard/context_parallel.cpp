#include "flatshard/fully_shard/context_parallel.h"

#include "flatshard/context_parallel/collective_context_parallel.h"
#include "flatshard/context_parallel/peer_context_parallel.h"
#include "flatshard/fully_shard/copy_fences.h"

#include <memory>

namespace flatshard {

nn::ContextParallelPtr make_context_parallel(
    Mesh& mesh,
    const std::string& axis,
    const ContextParallelOptions& options) {
  const int index = mesh.axis_index(axis);
  if (mesh.axis(index).size == 1) {
    return nullptr;
  }
  if (!options.copies) {
    return std::make_shared<CollectiveContextParallel>(
        mesh.communicator(index, Purpose::exchange).shared_from_this(),
        options.stream);
  }
  return std::make_shared<PeerContextParallel>(
      copy_fences(mesh, {&index, 1}),
      PeerContextParallelOptions{
          .window_nbytes = options.window_nbytes,
          .stream = options.stream});
}

}  // namespace flatshard
