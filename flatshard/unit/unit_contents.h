#pragma once

#include "flatshard/unit/unit.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

/// One parameter on its way into a unit.
struct UnitMember {
  at::Tensor tensor;  ///< the one that modules compute with; may be on meta
  GroupParameter parameter;
  Precision precision;
  /// Null, absent: as `common` and `mesh` of make_unit_contents say.
  std::shared_ptr<Mesh> mesh = nullptr;
  std::optional<Strategy> strategy = std::nullopt;
  std::optional<double> grad_divisor = std::nullopt;
  /// Every rank holds and updates all of it, whatever the strategy: its
  /// gradient is all-reduced.
  bool whole = false;
};

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

/// Shards the members: one group for all that share trainability, precision and
/// placement, the trainable ones first. The members' tensors have no data from
/// now on. Collective where the strategy has to spread the values.
///
/// @param mesh  the model's.
/// @param common  trainable, precision and placement are set per group.
/// @throws Error{usage} for a trainable tensor of another type than those of
///   Precision, naming it. Frozen ones may have any.
UnitContents make_unit_contents(
    std::vector<UnitMember> members,
    const std::shared_ptr<Mesh>& mesh,
    const ParamGroupOptions& common,
    const Initializer& initializer);

}  // namespace flatshard
