#pragma once

#include "flatshard/shape/group_shape.h"

#include <string>

namespace flatshard {

/// The memory of a group on a rank between all-gathers, and the stages in which
/// its gradient is reduced. They follow only from the group's shape, so the
/// runtime and the planner share them. tests/shape/storage_plan_test.cpp has
/// the table of all combinations.
struct StoragePlan {
  /// The memory of main weights.
  enum class Main {
    absent,   ///< none: GroupShape::has_weights is false
    compute,  ///< the memory of the compute plane
    device,   ///< separate memory
    host,     ///< separate memory of the host
  };
  /// The planes that are all-gathered.
  enum class Planes {
    made,     ///< nothing is stored: made for each all-gather
    sharded,  ///< each rank stores a shard
    whole,    ///< each rank stores all of them, without all-gathers
  };
  /// The reduction over the outermost axis of the model's mesh.
  enum class Outer {
    together,  ///< with the inner axes, or there is none
    after,     ///< after the inner axes, on a separate stream
    /// On that stream as well, and there are no inner axes: the group's full
    /// mesh is the outer axis.
    alone,
  };

  Main main = Main::absent;
  Planes planes = Planes::whole;
  /// More ranks store planes than main weights: the first all-gather after a
  /// change spreads them (ZeRO-1/2, HFSDP).
  bool spreads = false;
  /// The first all-gather after a change encodes the planes (FP8), since that
  /// may need other ranks. Otherwise the writer of main weights does.
  bool encodes = false;
  Outer outer = Outer::together;
  /// Between the microbatches of a step the gradient is a sum over some axes
  /// only, and the last microbatch reduces it over the rest.
  bool sums_inner = false;

  bool operator==(const StoragePlan&) const = default;

  bool main_is_compute() const { return main == Main::compute; }
  /// Returns whether every rank stores all of the planes that are otherwise
  /// all-gathered.
  bool resident() const { return planes == Planes::whole; }
  /// Returns whether planes are stored between all-gathers.
  bool rests() const { return planes != Planes::made; }
  /// Returns whether the first all-gather after a change of the weights has
  /// more work than the all-gather.
  bool has_refresh() const { return spreads || encodes; }
  /// Returns whether the outer axis is reduced apart from the inner ones, on a
  /// separate stream.
  bool has_outer_stage() const { return outer != Outer::together; }
};

/// @param shape  its strategy has as many axes as its mesh.
StoragePlan storage_plan(const GroupShape& shape);

/// Returns e.g. "main on device, planes sharded, spread, encoded, outer axis
/// after the inner ones".
std::string to_string(const StoragePlan& plan);

}  // namespace flatshard
