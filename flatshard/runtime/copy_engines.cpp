#include "flatshard/runtime/copy_engines.h"

#include "flatshard/buffer/peer_mesh.h"
#include "flatshard/unit/unit.h"

#include <utility>

namespace flatshard {

std::shared_ptr<Mesh> use_copy_engines(
    std::shared_ptr<Mesh> mesh,
    const std::vector<std::unique_ptr<Unit>>& units,
    const CopyEngines& copy_engines,
    const StreamOptions& stream) {
  if (!copy_engines.any()) {
    return mesh;
  }
  std::vector<PeerUse> uses;
  for (const auto& unit : units) {
    for (const auto& group : unit->groups()) {
      uses.push_back({group->mesh(), group->strategy()});
    }
  }
  mesh = with_peer_memory(
      std::move(mesh),
      uses,
      {.gathers = copy_engines.gather(),
       .reductions_nbytes = copy_engines.reductions_nbytes,
       .stream = stream});
  for (const auto& unit : units) {
    for (const auto& group : unit->groups()) {
      group->use_model_mesh(mesh);
    }
  }
  return mesh;
}

}  // namespace flatshard
