#include "flatshard/buffer/transition.h"

#include <algorithm>
#include <optional>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

using Kind = TransitionStep::Kind;

[[noreturn]] void
refuse(const Placements& from, const Placements& to, const std::string& why) {
  FLATSHARD_THROW(
      usage,
      "cannot redistribute from {} to {}: {}",
      to_string(from),
      to_string(to),
      why);
}

// Returns the change on one axis, nothing when the placement stays.
std::optional<Kind>
change_of_axis(const Placements& from, const Placements& to, std::size_t axis) {
  const Placement& a = from[axis];
  const Placement& b = to[axis];
  if (a == b) {
    return std::nullopt;
  }
  if (a.is_partial() && b.is_shard()) {
    return Kind::reduce_scatter;
  }
  if (a.is_partial() && b.is_replicate()) {
    return Kind::all_reduce;
  }
  if (a.is_shard() && b.is_replicate()) {
    return Kind::all_gather;
  }
  if (a.is_replicate() && b.is_shard()) {
    return Kind::slice;
  }
  if (a.is_replicate() && b.reduce_op() == ReduceOp::avg) {
    return Kind::relabel;
  }
  refuse(
      from,
      to,
      fmt::format(
          "axis {} cannot change from {} to {}",
          axis,
          a.to_string(),
          b.to_string()));
}

void check_lists(const Placements& from, const Placements& to) {
  if (from.size() != to.size()) {
    refuse(from, to, "expected one placement per mesh axis in both");
  }
  for (const Placements* list : {&from, &to}) {
    if (!shards_are_suffix(*list)) {
      refuse(
          from,
          to,
          fmt::format(
              "in {} the sharded axes are not the innermost ones",
              to_string(*list)));
    }
  }
}

}  // namespace

std::string to_string(TransitionStep::Kind kind) {
  switch (kind) {
    case Kind::reduce_scatter:
      return "reduce_scatter";
    case Kind::slice:
      return "slice";
    case Kind::all_reduce:
      return "all_reduce";
    case Kind::all_gather:
      return "all_gather";
    case Kind::relabel:
      return "relabel";
  }
  return "unknown";
}

bool communicates(TransitionStep::Kind kind) {
  return kind != Kind::slice && kind != Kind::relabel;
}

bool keeps_size(TransitionStep::Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::relabel;
}

std::vector<TransitionStep> plan_transition(
    const Placements& from,
    const Placements& to) {
  check_lists(from, to);
  const int num_axes = static_cast<int>(from.size());
  std::vector<TransitionStep> steps;
  Placements now = from;

  // Adds `axis` to the last step when it does the same, else makes a new one.
  const auto add = [&](Kind kind, int axis) {
    const ReduceOp op =
        from[axis].is_partial() ? from[axis].reduce_op() : ReduceOp::sum;
    if (steps.empty() || steps.back().kind != kind || steps.back().op != op) {
      steps.push_back({kind, {}, op, now});
    }
    now[axis] = to[axis];
    TransitionStep& step = steps.back();
    step.axes.insert(step.axes.begin(), axis);
    step.after = now;
  };

  // Reductions and local slices shard from the innermost axis outwards. Both
  // sharded lists are suffixes, so an all-gather never occurs together with
  // them.
  for (int axis = num_axes; axis-- > 0;) {
    const auto kind = change_of_axis(from, to, axis);
    if (kind == Kind::reduce_scatter || kind == Kind::slice) {
      add(*kind, axis);
    }
  }
  for (const Kind wanted :
       {Kind::all_reduce, Kind::all_gather, Kind::relabel}) {
    for (int axis = num_axes; axis-- > 0;) {
      if (change_of_axis(from, to, axis) == wanted) {
        add(wanted, axis);
      }
    }
  }
  return steps;
}

}  // namespace flatshard
