#pragma once

#include "flatshard/fully_shard/describe_groups.h"
#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/nn/module.h"
#include "flatshard/shape/unit_plan.h"

#include <memory>
#include <string>
#include <vector>

namespace flatshard {

/// A unit before it has memory.
struct UnitDescription {
  std::string name;
  nn::Module* module = nullptr;
  UnitId parent = kNoUnit;
  UnitPolicy policy;
  std::vector<GroupDescription> groups;

  UnitShape shape() const;
};

/// Returns the units of a model in the order of its module tree, the root
/// first: what fully_shard allocates, and what a plan prices. The parameters
/// may all be on the meta device. Communicates nothing.
/// @throws as fully_shard for options and parameters.
std::vector<UnitDescription> describe(
    nn::Module& root,
    const std::shared_ptr<Mesh>& mesh,
    const FullyShardOptions& options);

}  // namespace flatshard
