#include "flatshard/fully_shard/copy_fences.h"

#include "flatshard/peer/peer_communicator.h"

#include <string>
#include <utility>
#include <vector>

namespace flatshard {

void watch_exchange(
    Mesh& mesh,
    std::span<const int> axes,
    std::shared_ptr<Communicator> communicator) {
  std::vector<std::string> names;
  for (const int axis : axes) {
    names.push_back(mesh.axis(axis).name);
  }
  mesh.with_communicators(
      {{std::move(names), std::move(communicator), Purpose::exchange}});
}

std::shared_ptr<Communicator> copy_fences(
    Mesh& mesh,
    std::span<const int> axes) {
  auto group = mesh.communicator(axes, Purpose::exchange).shared_from_this();
  if (!mesh.device().is_cuda()) {
    return group;
  }
  auto fences = make_peer_communicator(std::move(group), {});
  watch_exchange(mesh, axes, fences);
  return fences;
}

}  // namespace flatshard
