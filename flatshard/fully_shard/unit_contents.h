#pragma once

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

/// Shards the parameters of `unit`: one group for all that share trainability,
/// precision and placement, the trainable ones first. Their tensors have no
/// data from now on. Collective where the strategy has to spread the values.
///
/// @param unit  its mesh is the model's; mesh and strategy serve the parameters
///   whose placement sets nothing else. Trainability is each tensor's own, or
///   GroupParameter::trainable.
/// @throws Error{usage} for a trainable tensor of a type outside of Precision,
///   naming it. Frozen ones may have any.
UnitContents make_unit_contents(
    GroupSpec unit,
    const ParamGroupOptions& options,
    const Initializer& initializer);

}  // namespace flatshard
