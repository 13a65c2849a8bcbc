#pragma once

#include "flatshard/mesh/mesh.h"
#include "flatshard/unit/unit.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace flatshard {

/// Returns the meshes of a model, each once: `mesh` (of the root unit), and
/// other meshes of units. A group of parameters may use a part of one.
inline std::vector<std::shared_ptr<Mesh>> model_meshes(
    std::shared_ptr<Mesh> mesh,
    const std::vector<std::unique_ptr<Unit>>& units) {
  std::vector<std::shared_ptr<Mesh>> meshes;
  meshes.push_back(std::move(mesh));
  for (const auto& unit : units) {
    for (const auto& group : unit->groups()) {
      const auto& own = group->model_mesh();
      if (std::ranges::none_of(meshes, [&](const auto& m) {
            return m->same_as(*own);
          })) {
        meshes.push_back(own);
      }
    }
  }
  return meshes;
}

}  // namespace flatshard
