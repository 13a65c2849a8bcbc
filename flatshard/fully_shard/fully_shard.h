#pragma once

#include "flatshard/group/param_group.h"
#include "flatshard/layout/padding.h"
#include "flatshard/layout/strategy.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/runtime/runtime.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

/// A module that is a unit, and in what it differs from the model.
struct UnitChoice {
  nn::Module* module = nullptr;
  /// The placement of all parameters of the unit; a value that `placement_of`
  /// sets for one of them wins.
  ParameterPlacement placement;
  /// Not set: RuntimeOptions' value. Prefetch lists name units by their ids: 0
  /// is the root, the others follow in the order of the module tree.
  std::optional<UnitPolicy> policy = std::nullopt;
};

struct FullyShardOptions {
  /// Modules that are unsharded and resharded as one unit, e.g. the blocks.
  /// Parameters below none of them belong to the root. Order does not matter.
  std::vector<nn::Module*> units;
  /// Units, the root among them if you like, that differ from the model: each
  /// once, whether or not `units` has it.
  std::vector<UnitChoice> unit_choices;
  /// A name of Strategy::named for the mesh's number of axes...
  std::string strategy = "zero3";
  /// ... or custom lists of placements.
  std::optional<Strategy> custom_strategy;
  Granularity granularity;
  /// Per parameter, by its main name: experts that are stored on a sub-mesh,
  /// rows for a row-wise optimizer. Empty: all as their unit.
  std::function<ParameterPlacement(const std::string& name)> placement_of;
  /// Per parameter, by its main name: FP8 weights. Only called for parameters
  /// that layers read through nn::WeightSource
  /// (nn::ParameterInfo::reads_planes) and that Float8Format::why_not accepts.
  /// Empty: none.
  std::function<std::optional<Float8Format>(
      const std::string& name,
      const std::vector<std::int64_t>& shape)>
      float8_of;
  /// Parameters that stay as they are: not sharded, all-gathered or reduced.
  std::function<bool(const std::string& name)> ignore;
  /// Padding that is accepted, as a fraction of the model's elements. Padding
  /// of less than 64 MiB per rank is always accepted.
  double max_padding = kDefaultMaxPadding;
  /// The seed of the values that parameters without memory start from.
  std::uint64_t seed = 0;
  /// Storage of weights and gradients: dtypes, scaling, offloading, padding.
  ParamGroupOptions group;
  /// How a step runs: prefetching, copy engines, memory, debugging.
  RuntimeOptions runtime;
};

/// Shards every parameter below `root` over `mesh` and installs the hooks that
/// unshard, reshard and reduce around forward and backward. Collective.
///
/// Parameters on the meta device are initialized by their InitSpec. Others keep
/// their values. These must be equal on all ranks. Afterwards the parameters
/// have data only while their unit is unsharded; optimizers update
/// `Runtime::groups()`.
///
/// A parameter with several names (tied weights) has one place. When several
/// units use it, it belongs to the closest unit around all of them.
///
/// The module has only a weak pointer to the Runtime: keep the result.
/// Destroying it frees all memory and leaves the parameters without data.
///
/// Called once, for the outermost module. Outside its unit's forward and
/// backward a parameter has a shape and no data. A program that reads or writes
/// it, or calls a module with it and not its unit, gets an exception that names
/// both.
///
/// @throws Error{config, usage} when options contradict each other, or when a
/// parameter was sharded before, naming the option, unit or parameter.
[[nodiscard]] std::shared_ptr<Runtime> fully_shard(
    nn::Module& root,
    std::shared_ptr<Mesh> mesh,
    FullyShardOptions options);

}  // namespace flatshard
