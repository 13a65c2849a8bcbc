#include "flatshard/fully_shard/context_parallel.h"

#include "flatshard/context_parallel/collective_context_parallel.h"
#include "flatshard/context_parallel/peer_context_parallel.h"
#include "flatshard/fully_shard/copy_fences.h"

#include <memory>
#include <utility>

namespace flatshard {

nn::ContextParallelPtr make_context_parallel(
    Mesh& mesh,
    const std::string& axis,
    const ContextParallelOptions& options) {
  const int index = mesh.axis_index(axis);
  const auto collective = [&](int of, nn::ContextParallelPtr hosts) {
    return std::make_shared<CollectiveContextParallel>(
        mesh.communicator(of, Purpose::exchange).shared_from_this(),
        options.stream,
        std::move(hosts));
  };
  nn::ContextParallelPtr hosts;
  if (!options.hosts.empty()) {
    const int over = mesh.axis_index(options.hosts);
    if (mesh.axis(over).size > 1) {
      hosts = collective(over, nullptr);
    }
  }
  if (mesh.axis(index).size == 1 && !hosts) {
    return nullptr;
  }
  if (!options.copies || mesh.axis(index).size == 1) {
    return collective(index, std::move(hosts));
  }
  return std::make_shared<PeerContextParallel>(
      copy_fences(mesh, {&index, 1}),
      PeerContextParallelOptions{
          .window_nbytes = options.window_nbytes,
          .stream = options.stream,
          .hosts = std::move(hosts)});
}

}  // namespace flatshard
