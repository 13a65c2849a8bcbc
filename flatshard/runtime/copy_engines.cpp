#include "flatshard/runtime/copy_engines.h"

#include "flatshard/buffer/peer_mesh.h"
#include "flatshard/runtime/model_meshes.h"
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
  std::shared_ptr<Mesh> of_root;
  for (const auto& own : model_meshes(std::move(mesh), units)) {
    std::vector<ParamGroup*> groups;
    std::vector<PeerUse> uses;
    for (const auto& unit : units) {
      for (const auto& group : unit->groups()) {
        if (group->model_mesh()->same_as(*own)) {
          groups.push_back(group.get());
          uses.push_back({group->mesh(), group->strategy()});
        }
      }
    }
    const auto with_peers = with_peer_memory(
        own,
        uses,
        {.gathers = copy_engines.gather(),
         .reductions_nbytes = copy_engines.reductions_nbytes,
         .stream = stream});
    for (ParamGroup* const group : groups) {
      group->use_model_mesh(with_peers);
    }
    of_root = of_root ? of_root : with_peers;
  }
  return of_root;
}

}  // namespace flatshard
