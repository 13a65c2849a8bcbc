#pragma once

#include "flatshard/group/precision.h"
#include "flatshard/layout/flat_layout.h"
#include "flatshard/layout/strategy.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/unit/runtime.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

struct FullyShardOptions {
  /// Modules that are gathered and released as a whole, e.g. the blocks.
  /// Parameters below none of them belong to the root. Order does not matter.
  std::vector<nn::Module*> units;
  /// A name of Strategy::named for the mesh's number of axes...
  std::string strategy = "zero3";
  /// ... or lists of placements of your own.
  std::optional<Strategy> custom_strategy;
  Precision precision;
  GradScaling scaling = GradScaling::mean;
  double grad_divisor = 1;
  /// All four: see ParamGroupOptions.
  bool narrow_grads = false;
  bool keep_compute_weights = true;
  bool offload = false;
  bool pin_memory = true;
  /// All ranks on one host only.
  CopyGathers copy_gathers = CopyGathers::none;
  /// Reduce-scatters are copies through so many bytes on each rank (see
  /// with_peer_memory); 0: they are collectives. All ranks of each group on one
  /// host.
  std::int64_t copy_reductions_nbytes = 0;
  /// Units gathered ahead.
  int prefetch = 1;
  /// false: weights stay gathered from forward to backward.
  bool reshard_after_forward = true;
  /// See RuntimeOptions.
  bool slots_on_demand = false;
  Granularity granularity;
  /// Per parameter, by its main name: experts that rest on a sub-mesh, rows for
  /// a row-wise optimizer. Empty: all as the options above say.
  std::function<ParameterPlacement(const std::string& name)> placement_of;
  LayoutOptions layout;
  /// Parameters that stay as they are: not sharded, not gathered, not reduced.
  std::function<bool(const std::string& name)> ignore;
  /// Of the values that parameters without memory start from.
  std::uint64_t seed = 0;
  /// For tests: delays on the communication streams.
  StreamOptions streams;
  bool trace = false;
  /// Checks that are off by default: poisoned memory, strict life cycles.
  DebugOptions debug;
  /// Regions of units as CUDA graphs; see docs/graphs.md.
  GraphOptions graphs;
};

/// Shards every parameter below `root` over `mesh` and installs the hooks that
/// gather, release and reduce around forward and backward. Collective.
///
/// Parameters on the meta device get their first values from their InitSpec;
/// others keep theirs, which have to be equal on all ranks. Afterwards the
/// parameters have data only while their unit is gathered; optimizers take
/// `Runtime::groups()`.
///
/// A parameter with several names (tied weights) has one place. When several
/// units use it, it belongs to the closest unit around all of them.
///
/// The module holds the Runtime only weakly: keep the result. Destroying it
/// frees all memory and leaves the parameters without data.
///
/// Called once, for the outermost module. Outside of its unit's forward and
/// backward a parameter has a shape and no data: who reads or writes it, or
/// calls a module with it and not its unit, gets an exception that names both.
///
/// @throws Error{config, usage} when options contradict each other, or when a
/// parameter was sharded before, naming the option, unit or parameter.
[[nodiscard]] std::shared_ptr<Runtime> fully_shard(
    nn::Module& root,
    std::shared_ptr<Mesh> mesh,
    FullyShardOptions options);

}  // namespace flatshard
