#pragma once

#include <string>
#include <vector>

#include "flatshard/layout/placement.h"

namespace flatshard {

/// One step of a change of placements: an operation on some mesh axes.
struct TransitionStep {
  enum class Kind {
    reduce_scatter,  ///< Partial -> Shard
    slice,           ///< Replicate -> Shard, local
    all_reduce,      ///< Partial -> Replicate
    all_gather,      ///< Shard -> Replicate
    relabel,         ///< Replicate -> Partial(avg), no data moves
  };
  Kind kind;
  std::vector<int> axes;  ///< ascending; one flattened group
  ReduceOp op = ReduceOp::sum;
  Placements after;  ///< placements when the step is done

  bool operator==(const TransitionStep&) const = default;
};

std::string to_string(TransitionStep::Kind kind);
/// Returns whether ranks exchange data; else the step is local.
bool communicates(TransitionStep::Kind kind);
/// Returns whether a rank has as many elements after the step as before.
bool keeps_size(TransitionStep::Kind kind);

/// Returns the steps from one list of placements to another, in execution
/// order. Empty when both are equal. Any number of axes may change; axes
/// that change in the same way do so in one step over their flattened
/// group.
///
/// | from \ to    | Replicate  | Shard          | Partial(avg) | Partial(sum) |
/// |--------------|------------|----------------|--------------|--------------|
/// | Replicate    | -          | slice          | relabel      | refused      |
/// | Shard        | all-gather | -              | refused      | refused      |
/// | Partial(avg) | all-reduce | reduce-scatter | -            | refused      |
/// | Partial(sum) | all-reduce | reduce-scatter | refused      | -            |
///
/// Axes become sharded from the innermost outwards, then partial axes are
/// reduced (on the small shard), then axes are all-gathered.
///
/// @throws Error{usage} with both lists when the lengths differ, a pair is
///   refused, or the sharded axes of a list are not its innermost ones.
std::vector<TransitionStep> plan_transition(
    const Placements& from,
    const Placements& to);

}  // namespace flatshard
