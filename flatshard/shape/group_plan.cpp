#include "flatshard/shape/group_plan.h"

#include "flatshard/core/rounding.h"
#include "flatshard/layout/local_range.h"

#include <algorithm>
#include <utility>

namespace flatshard {

GroupPlan::GroupPlan(GroupShape of)
    : shape(std::move(of)),
      storage(storage_plan(shape)),
      layout(std::make_shared<const FlatLayout>(FlatLayout::build(
          shape.tensors,
          shape.strategy.num_shards(shape.mesh.sizes),
          shape.alignment))),
      plane_layout(layout) {
  if (!shape.has_weights) {
    planes.resize(1);
    return;
  }
  if (!shape.float8) {
    planes.push_back(compute_plane());
    return;
  }
  if (shape.float8->sharded_scales_block > 0) {
    plane_layout = std::make_shared<const FlatLayout>(
        layout->with_scales(shape.float8->sharded_scales_block));
  }
  planes.push_back({.name = "compute"});
  planes.push_back(float8_plane(/*is_rows=*/true));
  planes.push_back(float8_plane(/*is_rows=*/false));
}

PlaneShape GroupPlan::compute_plane() const {
  return {
      .name = "compute",
      .layout = layout,
      .whole = {
          .num_parameters = layout->num_tensors(),
          .num_segments = static_cast<std::int64_t>(layout->segments().size()),
          .layout = layout,
          .nbytes = layout->numel() * shape.sizes.compute}};
}

PlaneShape GroupPlan::float8_plane(bool is_rows) const {
  constexpr PlaneId kRows = kComputePlane + 1;
  const Float8Shape& float8 = *shape.float8;
  PlaneShape plane{
      .name = is_rows ? "rows" : "columns",
      .source = is_rows || float8.stored_columns ? kStored : kRows,
      .in_forward = is_rows,
      .in_backward = !is_rows,
      .on_request = true,
      .layout = plane_layout};
  const bool scales_behind =
      plane.source != kStored && float8.scales_behind_columns;
  const std::int64_t num = layout->num_tensors();
  plane.whole = part_of(0, num, scales_behind);
  if (float8.gather_parts == GatherParts::unit) {
    return plane;
  }
  for (std::int64_t first = 0, i = 1; i <= num; ++i) {
    if (i == num || layout->spec(i).part != layout->spec(first).part) {
      plane.parts.push_back(part_of(first, i - first, scales_behind));
      first = i;
    }
  }
  return plane;
}

PlanePart GroupPlan::part_of(
    std::int64_t first_parameter,
    std::int64_t num_parameters,
    bool with_scales_behind) const {
  const auto& segments = plane_layout->segments();
  const auto num_segments = static_cast<std::int64_t>(segments.size());
  std::int64_t first = num_segments;
  std::int64_t end = 0;
  if (num_parameters == layout->num_tensors()) {
    first = 0;
    end = num_segments;
  }
  // With scales each segment of the group is followed by a segment of scales.
  const auto factor =
      static_cast<std::int64_t>(segments.size() / layout->segments().size());
  for (std::int64_t i = first_parameter; i < first_parameter + num_parameters;
       ++i) {
    const std::int64_t s = layout->tensor_segment(i) * factor;
    first = std::min(first, s);
    end = std::max(end, s + factor);
  }
  auto alone = std::make_shared<const FlatLayout>(
      plane_layout->of_segments(first, end - first));
  const std::int64_t nbytes =
      alone->numel() +
      (with_scales_behind ? nbytes_behind(first_parameter, num_parameters) : 0);
  return {
      .first_parameter = first_parameter,
      .num_parameters = num_parameters,
      .first_segment = first,
      .num_segments = end - first,
      .offset = segments[first].offset,
      .layout = std::move(alone),
      .nbytes = nbytes};
}

std::int64_t GroupPlan::nbytes_behind(std::int64_t first, std::int64_t count)
    const {
  std::int64_t nbytes = 0;
  for (std::int64_t i = first; i < first + count; ++i) {
    // Each one starts at a multiple of 16 bytes.
    nbytes += round_up(layout->spec(i).shape[1], kScaleMultiple) *
              static_cast<std::int64_t>(sizeof(float));
  }
  return nbytes;
}

// A shard among all ranks is what is stored anyway.
bool GroupPlan::has_post_forward() const {
  return shape.post_forward_ranks != 0 && !storage.resident() &&
         num_parts(shape.strategy.parameter, shape.mesh.sizes) !=
             shape.post_forward_ranks;
}

std::int64_t GroupPlan::post_forward_numel() const {
  return has_post_forward()
             ? local_numel(
                   *layout,
                   {Placement::shard()},
                   std::vector<std::int64_t>{shape.post_forward_ranks})
             : 0;
}

GroupBytes GroupPlan::bytes() const {
  GroupBytes bytes;
  const Strategy& strategy = shape.strategy;
  const std::vector<std::int64_t>& sizes = shape.mesh.sizes;
  const std::int64_t numel = local_numel(*layout, strategy.optimizer, sizes);
  if (shape.trainable) {
    bytes.numel = numel;
    bytes.gradients = numel * shape.sizes.gradient;
    bytes.local = layout->numel() * shape.sizes.accumulated;
  }
  if (storage.sums_inner) {
    bytes.inner = local_numel(*layout, strategy.gradient, sizes) *
                  shape.sizes.accumulated;
  }
  if (!shape.has_weights) {
    return bytes;
  }
  if (!storage.main_is_compute() && !can_drop_main()) {
    bytes.main = numel * shape.sizes.main;
  }
  if (shape.float8) {
    bytes.compute +=
        shape.float8->num_scales * static_cast<std::int64_t>(sizeof(float));
  }
  if (!storage.rests()) {
    return bytes;
  }
  const std::int64_t element = shape.float8 ? 1 : shape.sizes.compute;
  const std::int64_t num_stored =
      std::ranges::count_if(planes, &PlaneShape::stored);
  const auto of_planes = [&](const Placements& placements) {
    return num_stored * element * local_numel(*plane_layout, placements, sizes);
  };
  bytes.resting = of_planes(strategy.parameter);
  bytes.compute += bytes.resting;
  if (!shard_is_view()) {
    bytes.compute += of_planes(strategy.optimizer);
  }
  return bytes;
}

}  // namespace flatshard
