#pragma once

#include "flatshard/device/stream.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/runtime/copy_engines_choice.h"

#include <memory>
#include <vector>

namespace flatshard {

class Unit;

/// Gives the groups of `units` meshes like their own that have peer memory
/// where their all-gathers and reductions need it. Their former meshes and
/// other users of these are unchanged. Collective where anything is requested.
/// @param mesh  of the root unit.
/// @param stream  of the copies.
/// @return  the new mesh of the root unit; `mesh` where nothing is requested.
/// @throws Error{config, memory} as PeerMemory::create.
std::shared_ptr<Mesh> use_copy_engines(
    std::shared_ptr<Mesh> mesh,
    const std::vector<std::unique_ptr<Unit>>& units,
    const CopyEngines& copy_engines,
    const StreamOptions& stream);

}  // namespace flatshard
