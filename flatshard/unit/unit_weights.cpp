#include "flatshard/unit/unit_weights.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

std::vector<const GroupPlan*> plans_of(const UnitGroups& groups) {
  std::vector<const GroupPlan*> plans;
  for (const auto& group : groups) {
    plans.push_back(&group->plan());
  }
  return plans;
}

}  // namespace

UnitWeights::UnitWeights(const std::string& unit, const UnitGroups& groups)
    : groups_(groups), layout_(unit, plans_of(groups)) {
  check_same_encoding(unit, groups);
}

at::Tensor UnitWeights::post_forward_slot(std::size_t g, const SlotView& shards)
    const {
  return shards.tensor(
      layout_.offsets[layout_.slots.post_forward][g],
      {groups_[g]->weights().post_forward()->numel()},
      groups_[g]->options().precision.compute);
}

std::int64_t UnitWeights::generation() const {
  std::int64_t sum = 0;
  for (const auto& group : groups_) {
    sum += group->weights().version();
  }
  return sum;
}

std::int64_t UnitWeights::offset(const UnitParameter& p) const {
  const ParamGroup& group = *groups_[p.group];
  return layout_.offsets[kComputePlane][p.group] +
         p.offset(group, group.options().precision.compute);
}

at::Tensor UnitWeights::memory(
    std::size_t g,
    PlaneId plane,
    PartId part,
    const SlotView& slot) const {
  const WeightPlanes& weights = groups_[g]->weights();
  const Plane& of_group = weights.planes()[plane];
  if (weights.rests_whole(plane)) {
    return of_group.resting.local();
  }
  const auto element =
      static_cast<std::int64_t>(c10::elementSize(of_group.dtype));
  return slot.tensor(
      part == kWhole ? layout_.offsets[plane][g] : 0,
      {of_group.part(part_in_group(part)).nbytes / element},
      of_group.dtype);
}

void UnitWeights::gather_into(
    const SlotView& slot,
    PlaneId plane,
    PartId part,
    const std::vector<WeightPlanes::Gather>& gathers,
    const SlotView& shards) const {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (!is_in(g, plane, part)) {
      continue;
    }
    const WeightPlanes& weights = groups_[g]->weights();
    const at::Tensor whole = memory(g, plane, part, slot);
    if (shards && weights.post_forward() != nullptr) {
      weights.post_forward()->gather(post_forward_slot(g, shards), whole);
    } else {
      groups_[g]->weights().gather(
          plane,
          part_in_group(part),
          whole,
          gathers[g]);
    }
  }
}

void UnitWeights::save_post_forward(
    const SlotView& slot,
    const SlotView& shards) const {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (const auto* shard = groups_[g]->weights().post_forward()) {
      shard->save(
          memory(g, kComputePlane, kWhole, slot),
          post_forward_slot(g, shards));
    }
  }
}

void UnitWeights::derive_into(
    const SlotView& slot,
    PlaneId plane,
    PartId part,
    const SlotView& source) const {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (is_in(g, plane, part)) {
      groups_[g]->weights().derive(
          plane,
          part_in_group(part),
          memory(g, layout_.slots.derived_from[plane], part, source),
          memory(g, plane, part, slot));
    }
  }
}

PartId UnitWeights::part_of(const UnitParameter& p) const {
  const PartId in_group =
      static_cast<PartId>(groups_[p.group]->layout().spec(p.index).part);
  for (std::size_t i = 0; i < layout_.parts.size(); ++i) {
    if (layout_.parts[i].group == p.group &&
        layout_.parts[i].part == in_group) {
      return static_cast<PartId>(i);
    }
  }
  return kWhole;
}

// -- what layers ask for ------------------------------------------------------

std::optional<nn::WeightRecipe> UnitWeights::recipe(
    const UnitParameter& p) const {
  return groups_[p.group]->weights().recipe();
}

PlaneId UnitWeights::plane_of(const UnitParameter& p, nn::PlaneUse use) const {
  const std::vector<Plane>& planes = groups_[p.group]->weights().planes();
  const auto found = std::ranges::find_if(planes, [&](const Plane& plane) {
    return plane.on_request &&
           (use == nn::PlaneUse::fprop ? plane.in_forward : plane.in_backward);
  });
  FLATSHARD_CHECK(
      found != planes.end(),
      internal,
      "parameter {} has plain values and no plane to ask for",
      p.name);
  return static_cast<PlaneId>(found - planes.begin());
}

PlaneView UnitWeights::view(
    const UnitParameter& p,
    PlaneId plane,
    PartId part,
    const SlotView& slot) const {
  const WeightPlanes& weights = groups_[p.group]->weights();
  return weights.view(
      plane,
      weights.resident() ? kWhole : part_in_group(part),
      p.index,
      memory(p.group, plane, part, slot));
}

nn::EncodedWeight UnitWeights::operand(
    const UnitParameter& p,
    PlaneId plane,
    PlaneView view) const {
  return groups_[p.group]->weights().operand(plane, std::move(view));
}

}  // namespace flatshard
