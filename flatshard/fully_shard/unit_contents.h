#pragma once

#include "flatshard/fully_shard/describe_groups.h"
#include "flatshard/unit/unit.h"

#include <memory>
#include <string>
#include <vector>

namespace flatshard {

/// The sharded parameters of a unit before it has a place in a tree of units.
struct UnitContents {
  std::vector<std::unique_ptr<ParamGroup>> groups;
  std::vector<UnitParameter> parameters;

  /// @param unit  for messages.
  /// @param names  of each of `parameters`, the main name first.
  void set_names(
      const std::string& unit,
      const std::vector<std::vector<std::string>>& names);
};

/// Allocates the groups of a unit. The tensors of the parameters have no data
/// from now on. Collective where the strategy has to spread the values.
/// @param unit    for messages.
/// @param device  of the model's mesh.
UnitContents make_unit_contents(
    const std::string& unit,
    at::Device device,
    std::vector<GroupDescription> groups,
    const Initializer& initializer);

/// Allocates describe_groups(unit, options).
UnitContents make_unit_contents(
    GroupSpec unit,
    const ParamGroupOptions& options,
    const Initializer& initializer);

}  // namespace flatshard
