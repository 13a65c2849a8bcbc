#include "flatshard/shape/unit_plan.h"

#include "flatshard/core/log.h"
#include "flatshard/core/rounding.h"
#include "flatshard/schedule/slot_plan.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace flatshard {
namespace {

// Returns the bytes of a group's part of a slot.
std::int64_t align_slot(std::int64_t nbytes) {
  return round_up(nbytes, SlotPlan::kAlignment);
}

std::vector<const GroupPlan*> pointers_to(const std::vector<GroupPlan>& of) {
  std::vector<const GroupPlan*> pointers;
  for (const GroupPlan& group : of) {
    pointers.push_back(&group);
  }
  return pointers;
}

}  // namespace

UnitLayout::UnitLayout(
    const std::string& unit,
    std::span<const GroupPlan* const> groups) {
  slots.forward_reads = {};
  slots.backward_reads = {};
  slots.resident = true;
  std::size_t num_planes = 1;
  for (const GroupPlan* group : groups) {
    slots.resident = slots.resident && group->storage.resident();
    num_planes = std::max(num_planes, group->planes.size());
    if (group->shape.float8) {
      slots.gather_parts = group->shape.float8->gather_parts;
    }
  }
  offsets.resize(num_planes);
  slots.weights_nbytes.resize(num_planes, 0);
  slots.derived_from.resize(num_planes, kStored);
  slots.part_nbytes.resize(num_planes);
  find_parts(unit, groups);
  for (std::size_t plane = 0; plane < num_planes; ++plane) {
    add_plane(static_cast<PlaneId>(plane), groups);
  }
  add_post_forward_plane(groups);
  add_gradients(groups);
  for (const GroupPlan* group : groups) {
    if (slots.resident && group->has(kComputePlane) &&
        group->storage.has_refresh()) {
      refreshed_nbytes_ += group->bytes().resting;
    }
  }
}

void UnitLayout::find_parts(
    const std::string& unit,
    std::span<const GroupPlan* const> groups) {
  std::size_t num_planes_in_parts = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    std::size_t num_parts = 0;
    std::size_t num_planes = 0;
    for (const PlaneShape& plane : groups[g]->planes) {
      num_parts = std::max(num_parts, plane.parts.size());
      num_planes += plane.parts.empty() ? 0 : 1;
    }
    num_planes_in_parts = std::max(num_planes_in_parts, num_planes);
    if (!groups[g]->storage.resident()) {
      for (std::size_t part = 0; part < num_parts; ++part) {
        parts.push_back({g, static_cast<PartId>(part)});
      }
    }
  }
  if (parts.empty()) {
    return;
  }
  const std::size_t most =
      (PlaneSet::kMaxPlanes - offsets.size()) / num_planes_in_parts;
  if (parts.size() > most) {
    static std::once_flag said;
    std::call_once(said, [&] {
      log_warning(
          "unit {} has {} parts of FP8 weights; more than {} are not "
          "distinguished, so its planes are all-gathered together and "
          "gather_parts has no effect there; smaller units would be "
          "all-gathered in parts (logged once)",
          unit,
          parts.size(),
          most);
    });
  }
  // A single part is the same as no parts.
  if (parts.size() < 2 || parts.size() > most) {
    parts.clear();
  }
}

void UnitLayout::add_plane(
    PlaneId plane,
    std::span<const GroupPlan* const> groups) {
  std::int64_t& nbytes = slots.weights_nbytes[plane];
  for (const GroupPlan* group : groups) {
    offsets[plane].push_back(nbytes);
    if (!group->has(plane)) {
      continue;
    }
    const PlaneShape& of_group = group->planes[plane];
    if (of_group.in_forward) {
      slots.forward_reads.insert(plane);
    }
    if (of_group.in_backward) {
      slots.backward_reads.insert(plane);
    }
    slots.derived_from[plane] = of_group.source;
    if (of_group.source != kStored) {
      slots.transient.insert(plane);
    }
    if (of_group.on_request) {
      slots.on_request.insert(plane);
    }
    if (!group->rests_whole(plane)) {
      nbytes += align_slot(of_group.whole.nbytes);
    }
  }
  if (slots.on_request.contains(plane)) {
    nbytes = std::max(nbytes, SlotPlan::kAlignment);  // 0: never unsharded
    for (const Part& part : parts) {
      slots.part_nbytes[plane].push_back(
          groups[part.group]->planes[plane].part(part.part).nbytes);
    }
  } else {
    // A unit's parameters are set and reset with it, even if it has no values.
    slots.forward_reads.insert(plane);
    slots.backward_reads.insert(plane);
  }
}

// After the groups' planes. Parameters do not point at it.
void UnitLayout::add_post_forward_plane(
    std::span<const GroupPlan* const> groups) {
  std::int64_t nbytes = 0;
  std::vector<std::int64_t> of_groups;
  for (const GroupPlan* group : groups) {
    of_groups.push_back(nbytes);
    nbytes +=
        align_slot(group->post_forward_numel() * group->shape.sizes.compute);
  }
  if (nbytes == 0) {
    return;
  }
  slots.post_forward = static_cast<PlaneId>(offsets.size());
  offsets.push_back(std::move(of_groups));
  slots.weights_nbytes.push_back(nbytes);
  slots.derived_from.push_back(kStored);
  slots.part_nbytes.emplace_back();
}

void UnitLayout::add_gradients(std::span<const GroupPlan* const> groups) {
  slots.reduce_every_microbatch = false;
  for (const GroupPlan* group : groups) {
    grad_offsets.push_back(slots.grad_nbytes);
    if (!group->shape.trainable) {
      continue;
    }
    slots.grad_nbytes +=
        align_slot(group->layout->numel() * group->shape.sizes.reduce);
    if (num_sharded_axes(group->shape.strategy.gradient) > 0) {
      slots.reduce_every_microbatch = true;
    }
  }
}

UnitSpec UnitLayout::spec(std::string name, UnitId parent, UnitPolicy policy)
    const {
  UnitSpec spec = slots;
  spec.name = std::move(name);
  spec.parent = parent;
  spec.policy = std::move(policy);
  spec.weights_nbytes[kComputePlane] += refreshed_nbytes_;
  return spec;
}

UnitPlan::UnitPlan(const UnitShape& shape)
    : groups(shape.groups.begin(), shape.groups.end()),
      spec(UnitLayout(shape.name, pointers_to(groups))
               .spec(shape.name, shape.parent, shape.policy)) {
}

}  // namespace flatshard
