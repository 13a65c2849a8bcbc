#include "flatshard/layout/strategy.h"

#include <array>
#include <utility>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

/// One value for the outer axis (axis 0) and one for all inner axes.
struct OuterInner {
  Placement outer;
  Placement inner;

  Placements expand(int num_axes) const {
    Placements placements(num_axes, inner);
    placements.front() = outer;
    return placements;
  }
};

struct Recipe {
  OuterInner parameter;
  OuterInner gradient;
  OuterInner optimizer;
  bool needs_outer_axis;
};

std::optional<Recipe> find_recipe(std::string_view name, ReduceOp op) {
  const Placement r = Placement::replicate();
  const Placement s = Placement::shard();
  const Placement p = Placement::partial(op);
  if (name == "no_shard" || name == "zero0") {
    return Recipe{{r, r}, {p, p}, {r, r}, false};
  }
  if (name == "optim" || name == "zero1") {
    return Recipe{{r, r}, {p, p}, {s, s}, false};
  }
  if (name == "optim_grads" || name == "zero2") {
    return Recipe{{r, r}, {s, s}, {s, s}, false};
  }
  if (name == "optim_grads_params" || name == "zero3") {
    return Recipe{{s, s}, {s, s}, {s, s}, false};
  }
  if (name == "hsdp") {
    return Recipe{{r, s}, {p, s}, {r, s}, true};
  }
  if (name == "hfsdp") {
    return Recipe{{r, s}, {p, s}, {s, s}, true};
  }
  if (name == "hsdp_zero1") {
    return Recipe{{r, r}, {p, p}, {r, s}, true};
  }
  if (name == "hsdp_zero2") {
    return Recipe{{r, r}, {p, s}, {r, s}, true};
  }
  return std::nullopt;
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
      "ones (the innermost axis is cut first, so only then is each rank's part "
      "contiguous)",
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

/// Where `from` is sharded, `to` must be sharded as well.
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

Strategy Strategy::named(std::string_view name, int num_axes, ReduceOp op) {
  const std::optional<Recipe> recipe = find_recipe(name, op);
  FLATSHARD_CHECK(
      recipe.has_value(),
      config,
      "unknown strategy '{}'; expected no_shard (zero0), optim (zero1), "
      "optim_grads (zero2), optim_grads_params (zero3), hsdp, hfsdp, "
      "hsdp_zero1 or hsdp_zero2",
      name);
  FLATSHARD_CHECK(
      num_axes >= (recipe->needs_outer_axis ? 2 : 1),
      config,
      "strategy '{}' needs at least {} mesh axes, got {}",
      name,
      recipe->needs_outer_axis ? 2 : 1,
      num_axes);
  return {
      .name = std::string(name),
      .parameter = recipe->parameter.expand(num_axes),
      .gradient = recipe->gradient.expand(num_axes),
      .optimizer = recipe->optimizer.expand(num_axes)};
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
        "Shard (a gradient at rest is reduced only as far as the optimizer "
        "needs)",
        name,
        axis);
  }
  check_implies(*this, parameters, gradients);
  check_implies(*this, gradients, optimizers);
  check_suffix(*this, parameters);
  check_suffix(*this, gradients);
  check_suffix(*this, optimizers);
  if (post_forward.has_value()) {
    const NamedList after{"post_forward", *post_forward};
    check_length(*this, after);
    check_kinds(*this, after);
    check_implies(*this, after, parameters);
    check_suffix(*this, after);
  }
}

}  // namespace flatshard
