#include "flatshard/fully_shard/context_parallel.h"

#include "flatshard/context_parallel/collective_context_parallel.h"

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
  return std::make_shared<CollectiveContextParallel>(
      mesh.communicator(index, Purpose::exchange).shared_from_this(),
      options.stream);
}

}  // namespace flatshard
