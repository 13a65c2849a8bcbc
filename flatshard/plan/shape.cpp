#include "flatshard/plan/shape.h"

#include "flatshard/layout/local_range.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace flatshard::plan {
namespace {

constexpr std::int64_t kScaleMultiple = 4;  // as Float8Scales

std::int64_t up_to(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

bool same_elements(
    const Placements& a,
    const Placements& b,
    const std::vector<std::int64_t>& sizes) {
  for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
    if (sizes[axis] > 1 && a[axis] != b[axis]) {
      return false;
    }
  }
  return true;
}

bool any_sharded(
    const Placements& placements,
    const std::vector<std::int64_t>& sizes,
    bool made_for_gathers) {
  for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
    if ((sizes[axis] > 1 || made_for_gathers) && placements[axis].is_shard()) {
      return true;
    }
  }
  return false;
}

std::int64_t product(const std::vector<std::int64_t>& sizes) {
  return std::accumulate(
      sizes.begin(),
      sizes.end(),
      std::int64_t{1},
      std::multiplies<>());
}

/// Float32 numbers of scales that every rank has.
std::int64_t scales_nbytes(const Float8Shape& float8) {
  if (float8.sharded_scales_block > 0) {
    return 0;
  }
  std::int64_t numel = 0;
  for (std::size_t i = 0; i < float8.rows_scales.size(); ++i) {
    numel += up_to(float8.rows_scales[i], kScaleMultiple);
    if (!float8.columns_scales.empty()) {
      numel += up_to(float8.columns_scales[i], kScaleMultiple);
    }
  }
  return numel * static_cast<std::int64_t>(sizeof(float));
}

/// A run of parameters of a plane that is gathered alone, in bytes.
struct PartBytes {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

std::vector<PartBytes> parts_of(const GroupPlan& group) {
  std::vector<PartBytes> parts;
  const std::int64_t num = group.layout.num_tensors();
  for (std::int64_t first = 0, i = 1; i <= num; ++i) {
    if (i == num ||
        group.layout.spec(i).part != group.layout.spec(first).part) {
      parts.push_back({first, i - first});
      first = i;
    }
  }
  return parts;
}

/// Returns the bytes of the slot of an FP8 plane, or of a part of one.
std::int64_t
float8_nbytes(const GroupPlan& group, const PartBytes& part, bool is_derived) {
  const Float8Shape& float8 = *group.shape.float8;
  const auto segments =
      static_cast<std::int64_t>(group.plane_layout.segments().size());
  const std::int64_t factor =
      segments / static_cast<std::int64_t>(group.layout.segments().size());
  std::int64_t first = segments;
  std::int64_t end = 0;
  if (part.count == group.layout.num_tensors()) {
    first = 0;
    end = segments;
  }
  std::int64_t behind = 0;
  for (std::int64_t i = part.first; i < part.first + part.count; ++i) {
    const std::int64_t s = group.layout.tensor_segment(i) * factor;
    first = std::min(first, s);
    end = std::max(end, s + factor);
    behind += up_to(group.layout.spec(i).shape[1], kScaleMultiple) *
              static_cast<std::int64_t>(sizeof(float));
  }
  std::int64_t nbytes = 0;
  for (std::int64_t s = first; s < end; ++s) {
    nbytes += group.plane_layout.segments()[s].numel;
  }
  return nbytes + (is_derived && float8.scales_behind_columns ? behind : 0);
}

}  // namespace

GroupPlan::GroupPlan(GroupShape of)
    : shape(std::move(of)),
      layout(FlatLayout::build(
          shape.tensors,
          shape.strategy.num_shards(shape.axis_sizes),
          shape.alignment)),
      plane_layout(
          shape.float8 && shape.float8->sharded_scales_block > 0
              ? layout.with_scales(shape.float8->sharded_scales_block)
              : layout) {
  const Strategy& strategy = shape.strategy;
  const std::vector<std::int64_t>& sizes = shape.axis_sizes;
  const bool fp8 = shape.float8.has_value();
  const bool cut_alike =
      same_elements(strategy.parameter, strategy.optimizer, sizes);
  const bool spreads = !cut_alike && (shape.trainable || fp8);
  has_refresh = spreads || fp8;
  const bool main_is_compute =
      !fp8 && (!shape.trainable || shape.sizes.main == shape.sizes.compute);
  const bool made_for_gathers =
      !shape.keep_compute_weights && !main_is_compute && cut_alike;
  resident = !any_sharded(strategy.parameter, sizes, made_for_gathers);
  const bool rests =
      shape.keep_compute_weights || main_is_compute || resident || spreads;
  const std::int64_t numel = local_numel(layout, strategy.optimizer, sizes);
  if (shape.trainable) {
    bytes.numel = numel;
    bytes.main = main_is_compute ? 0 : numel * shape.sizes.main;
    bytes.gradients = numel * shape.sizes.gradient;
  } else if (!main_is_compute && !shape.keep_compute_weights) {
    bytes.main =
        numel * shape.sizes.compute;  // else dropped: drop_main_weights
  }
  const std::int64_t planes = fp8 && shape.float8->stored_columns ? 2 : 1;
  const std::int64_t element = fp8 ? 1 : shape.sizes.compute;
  if (rests) {
    bytes.resting =
        planes * element * local_numel(plane_layout, strategy.parameter, sizes);
    bytes.compute = bytes.resting;
    if (spreads && plane_layout.segments().size() != 1) {
      bytes.compute += planes * element *
                       local_numel(plane_layout, strategy.optimizer, sizes);
    }
  }
  bytes.compute += fp8 ? scales_nbytes(*shape.float8) : 0;

  has_outer_stage = shape.trainable && sizes.size() > 1 && sizes.front() > 1 &&
                    strategy.gradient.front().is_partial() &&
                    product(sizes) > sizes.front() &&
                    num_sharded_axes(strategy.optimizer) > 0 &&
                    (strategy.optimizer.front().is_replicate() ||
                     num_sharded_axes(strategy.gradient) > 0);
  if (shape.post_forward_ranks > 0 && !resident) {
    if (num_parts(strategy.parameter, sizes) != shape.post_forward_ranks) {
      post_forward_numel = local_numel(
          layout,
          {Placement::shard()},
          std::vector<std::int64_t>{shape.post_forward_ranks});
    }
  }
}

UnitPlan::UnitPlan(const UnitShape& shape) {
  spec.name = shape.name;
  spec.parent = shape.parent;
  spec.policy = shape.policy;
  spec.forward_reads = {};
  spec.backward_reads = {};
  spec.resident = true;
  spec.reduce_every_microbatch = false;
  std::size_t num_planes = 1;
  for (const GroupShape& group : shape.groups) {
    groups.emplace_back(group);
    spec.resident = spec.resident && groups.back().resident;
    num_planes = group.float8 ? 3 : num_planes;
    if (group.float8) {
      spec.gather_parts = group.float8->gather_parts;
    }
    spec.reduce_every_microbatch =
        spec.reduce_every_microbatch ||
        (group.trainable && num_sharded_axes(group.strategy.gradient) > 0);
  }
  spec.weights_nbytes.resize(num_planes, 0);
  spec.derived_from.resize(num_planes, kStored);
  spec.part_nbytes.resize(num_planes);
  constexpr PlaneId kRows = kComputePlane + 1;
  std::size_t num_parts = 0;
  for (const GroupPlan& group : groups) {
    if (group.shape.float8 && !group.resident &&
        group.shape.float8->gather_parts != GatherParts::unit) {
      num_parts += parts_of(group).size();
    }
  }
  // UnitWeights::find_parts has the same rule: one part is the whole.
  const std::size_t most = (PlaneSet::kMaxPlanes - num_planes) / 2;
  const bool in_parts = num_parts >= 2 && num_parts <= most;
  for (PlaneId plane = 0; plane < static_cast<PlaneId>(num_planes); ++plane) {
    std::int64_t& nbytes = spec.weights_nbytes[plane];
    for (const GroupPlan& group : groups) {
      const std::optional<Float8Shape>& float8 = group.shape.float8;
      if (float8.has_value() != (plane != kComputePlane)) {
        continue;
      }
      const bool is_derived = plane > kRows && !float8->stored_columns;
      if (plane == kComputePlane) {
        spec.forward_reads.insert(plane);
        spec.backward_reads.insert(plane);
      } else {
        (plane == kRows ? spec.forward_reads : spec.backward_reads)
            .insert(plane);
        spec.on_request.insert(plane);
        if (is_derived) {
          spec.derived_from[plane] = kRows;
          spec.transient.insert(plane);
        }
      }
      if (!group.resident || is_derived) {
        nbytes += up_to(
            float8 ? float8_nbytes(
                         group,
                         {0, group.layout.num_tensors()},
                         is_derived)
                   : group.layout.numel() * group.shape.sizes.compute,
            kSlotMultiple);
      }
      if (float8 && in_parts && !group.resident) {
        for (const PartBytes& part : parts_of(group)) {
          spec.part_nbytes[plane].push_back(
              float8_nbytes(group, part, is_derived));
        }
      }
    }
    if (spec.on_request.contains(plane)) {
      nbytes = std::max(nbytes, kSlotMultiple);
    } else {
      spec.forward_reads.insert(plane);
      spec.backward_reads.insert(plane);
    }
  }
  std::int64_t post_forward = 0;
  for (const GroupPlan& group : groups) {
    post_forward += up_to(
        group.post_forward_numel * group.shape.sizes.compute,
        kSlotMultiple);
    if (group.shape.trainable) {
      spec.grad_nbytes +=
          up_to(group.layout.numel() * group.shape.sizes.reduce, kSlotMultiple);
    }
  }
  if (post_forward > 0) {
    spec.post_forward = static_cast<PlaneId>(num_planes);
    spec.weights_nbytes.push_back(post_forward);
    spec.derived_from.push_back(kStored);
    spec.part_nbytes.emplace_back();
  }
  for (const GroupPlan& group : groups) {
    if (spec.resident && !group.shape.float8 && group.has_refresh) {
      spec.weights_nbytes[kComputePlane] += group.bytes.resting;
    }
  }
}

}  // namespace flatshard::plan
