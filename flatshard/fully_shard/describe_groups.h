#pragma once

#include "flatshard/group/param_group.h"
#include "flatshard/shape/group_shape.h"

#include <vector>

namespace flatshard {

/// A group before it has memory. All options of its parameters are resolved.
struct GroupDescription {
  GroupSpec spec;
  ParamGroupOptions options;

  GroupShape shape() const;
};

/// Returns the groups of the parameters of `unit`: one for all that share
/// trainability, precision and placement, the trainable ones first.
/// @param unit  has the model's mesh; mesh and strategy serve the parameters
///   whose placement sets nothing else. Trainability is each tensor's own, or
///   GroupParameter::trainable.
/// @throws Error{usage} for a trainable tensor of a type outside Precision. The
///   error names it. Frozen ones may have any.
std::vector<GroupDescription> describe_groups(
    GroupSpec unit,
    const ParamGroupOptions& options);

}  // namespace flatshard
