#include "flatshard/layout/strategy.h"

#include <array>
#include <utility>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

constexpr std::array<StrategyName, 8> kStrategies{{
    {"zero0", "no_shard", "zero0", "RR", "PP", "RR"},
    {"zero1", "optim", "hsdp_zero1", "RR", "PP", "SS"},
    {"zero2", "optim_grads", "hsdp_zero2", "RR", "SS", "SS"},
    {"zero3", "optim_grads_params", "hsdp", "SS", "SS", "SS"},
    {"hsdp", "", "", "RS", "PS", "RS"},
    {"hfsdp", "", "", "RS", "PS", "SS"},
    {"hsdp_zero1", "", "", "RR", "PP", "RS"},
    {"hsdp_zero2", "", "", "RR", "PS", "RS"},
}};

Placement placement_of(char letter, ReduceOp op) {
  return letter == 'S'   ? Placement::shard()
         : letter == 'P' ? Placement::partial(op)
                         : Placement::replicate();
}

// Axis 0 is the outer one; a single axis is an inner one.
Placements placements_of(
    std::string_view letters,
    bool has_outer,
    int num_axes,
    ReduceOp op) {
  Placements placements(num_axes, placement_of(letters[1], op));
  if (has_outer) {
    placements.front() = placement_of(letters[0], op);
  }
  return placements;
}

struct NamedList {
  const char* name;
  const Placements& placements;
};

void check_length(const Strategy& strategy, const NamedList& list) {
  FLATSHARD_CHECK(
      list.placements.size() == strategy.parameter.size(),
      config,
      "strategy '{}': {} has {} placements but parameter has {}; expected one "
      "per mesh axis in every list",
      strategy.name,
      list.name,
      list.placements.size(),
      strategy.parameter.size());
}

void check_suffix(const Strategy& strategy, const NamedList& list) {
  FLATSHARD_CHECK(
      shards_are_suffix(list.placements),
      config,
      "strategy '{}': {} is {}; expected the sharded axes to be the innermost "
      "ones (the innermost axis is split first, so only then is each rank's "
      "part contiguous)",
      strategy.name,
      list.name,
      to_string(list.placements));
}

void check_kinds(const Strategy& strategy, const NamedList& list) {
  for (std::size_t axis = 0; axis < list.placements.size(); ++axis) {
    FLATSHARD_CHECK(
        !list.placements[axis].is_partial(),
        config,
        "strategy '{}': {} on axis {} is {}; expected Replicate or Shard",
        strategy.name,
        list.name,
        axis,
        list.placements[axis].to_string());
  }
}

/// If `from` is sharded, `to` must be sharded as well.
void check_implies(
    const Strategy& strategy,
    const NamedList& from,
    const NamedList& to) {
  for (std::size_t axis = 0; axis < from.placements.size(); ++axis) {
    FLATSHARD_CHECK(
        !from.placements[axis].is_shard() || to.placements[axis].is_shard(),
        config,
        "strategy '{}': {} is sharded on axis {} but {} is {} there; expected "
        "Shard",
        strategy.name,
        from.name,
        axis,
        to.name,
        to.placements[axis].to_string());
  }
}

}  // namespace

std::span<const StrategyName> strategy_names() {
  return kStrategies;
}

const StrategyName& find_strategy_name(std::string_view name) {
  std::string known;
  for (const StrategyName& row : kStrategies) {
    if (name == row.name || (!name.empty() && name == row.other_name)) {
      return row;
    }
    known += known.empty() ? "" : ", ";
    known += row.name;
    if (!row.other_name.empty()) {
      known += fmt::format(" ({})", row.other_name);
    }
  }
  FLATSHARD_THROW(
      config,
      "unknown strategy '{}'; expected one of {}",
      name,
      known);
}

Strategy Strategy::named(std::string_view name, int num_axes, ReduceOp op) {
  const StrategyName& row = find_strategy_name(name);
  const int least = row.needs_outer_axis() ? 2 : 1;
  FLATSHARD_CHECK(
      num_axes >= least,
      config,
      "strategy '{}' needs at least {} mesh axes, got {}",
      name,
      least,
      num_axes);
  const auto expand = [&](std::string_view letters) {
    return placements_of(letters, row.needs_outer_axis(), num_axes, op);
  };
  return {
      .name = std::string(name),
      .parameter = expand(row.parameter),
      .gradient = expand(row.gradient),
      .optimizer = expand(row.optimizer)};
}

std::int64_t Strategy::num_shards(
    std::span<const std::int64_t> axis_sizes) const {
  FLATSHARD_CHECK(
      axis_sizes.size() == optimizer.size(),
      usage,
      "strategy '{}' has {} axes, the mesh has {}",
      name,
      optimizer.size(),
      axis_sizes.size());
  std::int64_t product = 1;
  for (std::size_t axis = 0; axis < axis_sizes.size(); ++axis) {
    if (optimizer[axis].is_shard()) {
      product *= axis_sizes[axis];
    }
  }
  return product;
}

void Strategy::validate() const {
  const NamedList parameters{"parameter", parameter};
  const NamedList gradients{"gradient", gradient};
  const NamedList optimizers{"optimizer", optimizer};
  FLATSHARD_CHECK(
      !parameter.empty(),
      config,
      "strategy '{}': parameter has no placements; expected one per mesh axis",
      name);
  check_length(*this, gradients);
  check_length(*this, optimizers);
  check_kinds(*this, parameters);
  check_kinds(*this, optimizers);
  for (std::size_t axis = 0; axis < gradient.size(); ++axis) {
    FLATSHARD_CHECK(
        !gradient[axis].is_replicate(),
        config,
        "strategy '{}': gradient on axis {} is Replicate; expected Partial or "
        "Shard (a stored gradient is reduced only as far as the optimizer "
        "needs)",
        name,
        axis);
  }
  check_implies(*this, parameters, gradients);
  check_implies(*this, gradients, optimizers);
  check_suffix(*this, parameters);
  check_suffix(*this, gradients);
  check_suffix(*this, optimizers);
}

}  // namespace flatshard
