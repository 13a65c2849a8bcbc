#pragma once

#include "flatshard/fully_shard/describe.h"
#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/models/llama.h"
#include "flatshard/schedule/overlap_events.h"
#include "flatshard/shape/unit_plan.h"

#include <memory>
#include <vector>

namespace flatshard {

/// The units of a model before they have memory.
struct PlannedUnits {
  std::vector<UnitDescription> descriptions;  ///< by UnitId
  std::vector<UnitShape> shapes;              ///< of the descriptions
  PlanUnits by_node;
};

/// Returns the mesh of rank 0 without the other ranks: never communicates.
std::shared_ptr<Mesh> planned_mesh(const std::vector<MeshAxis>& axes);

/// Describes the units that fully_shard would allocate with these options.
/// @throws Error{config} as it does.
PlannedUnits planned_units(
    models::Llama& model,
    const std::shared_ptr<Mesh>& mesh,
    const FullyShardOptions& options);

}  // namespace flatshard
