#include "flatshard/fully_shard/context_parallel.h"

#include "flatshard/context_parallel/collective_context_parallel.h"
#include "flatshard/context_parallel/peer_context_parallel.h"
#include "flatshard/peer/peer_communicator.h"

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
  const auto group =
      mesh.communicator(index, Purpose::exchange).shared_from_this();
  if (!options.copies) {
    return std::make_shared<CollectiveContextParallel>(group, options.stream);
  }
  auto fences = group;
  if (mesh.device().is_cuda()) {
    fences = make_peer_communicator(group, {});
    mesh.with_communicators({{{axis}, fences, Purpose::exchange}});
  }
  return std::make_shared<PeerContextParallel>(
      fences,
      PeerContextParallelOptions{
          .window_nbytes = options.window_nbytes,
          .stream = options.stream});
}

}  // namespace flatshard
