#include "flatshard/unit/unit_weights.h"

#include <ATen/ATen.h>

namespace flatshard {

UnitWeights::UnitWeights(const std::string& unit, const UnitGroups& groups)
    : groups_(groups), offsets_(kPostForwardPlane + 1) {
  std::int64_t nbytes = 0;
  for (const auto& group : groups_) {
    offsets_[kComputePlane].push_back(nbytes);
    resident_ = resident_ && group->weights().resident();
    if (!group->weights().resident() && !group->weights().float8()) {
      const auto size = c10::elementSize(group->options().precision.compute);
      nbytes +=
          align_slot(group->layout().numel() * static_cast<std::int64_t>(size));
    }
  }
  planes_.weights_nbytes = {nbytes};
  add_float8_planes(unit);
  add_post_forward_plane();
}

void UnitWeights::add_post_forward_plane() {
  std::int64_t nbytes = 0;
  for (const auto& group : groups_) {
    offsets_[kPostForwardPlane].push_back(nbytes);
    if (const auto* shard = group->weights().post_forward()) {
      const auto size = c10::elementSize(group->options().precision.compute);
      nbytes += align_slot(shard->numel() * static_cast<std::int64_t>(size));
    }
  }
  if (nbytes > 0) {
    planes_.weights_nbytes.resize(kPostForwardPlane + 1, 0);
    planes_.weights_nbytes[kPostForwardPlane] = nbytes;
    planes_.post_forward = kPostForwardPlane;
    planes_.forward_reads = planes_.backward_reads = {kComputePlane};
  }
}

at::Tensor UnitWeights::compute_slot(std::size_t g, const SlotView& slot)
    const {
  return slot.tensor(
      offsets_[kComputePlane][g],
      {groups_[g]->layout().numel()},
      groups_[g]->options().precision.compute);
}

at::Tensor UnitWeights::post_forward_slot(std::size_t g, const SlotView& shards)
    const {
  return shards.tensor(
      offsets_[kPostForwardPlane][g],
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

void UnitWeights::describe(UnitSpec& spec) const {
  spec.resident = resident_;
  spec.transient = transient_;
  for (const auto& group : groups_) {
    if (resident_ && !group->weights().float8() &&
        group->weights().has_refresh()) {
      spec.weights_nbytes[kComputePlane] += group->weights().compute().nbytes();
    }
  }
}

std::int64_t UnitWeights::offset(const UnitParameter& p) const {
  const ParamGroup& group = *groups_[p.group];
  return offsets_[kComputePlane][p.group] +
         p.offset(group, group.options().precision.compute);
}

void UnitWeights::gather_into(
    const SlotView& slot,
    PlaneId plane,
    PartId part,
    const std::vector<WeightPlanes::Gather>& gathers,
    const SlotView& shards) const {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    ParamGroup& group = *groups_[g];
    if (!is_in_plane(group, plane) || !is_in_part(g, part)) {
      continue;
    }
    const bool resident = group.weights().resident();
    if (shards && group.weights().post_forward() != nullptr) {
      group.weights().post_forward()->gather(
          post_forward_slot(g, shards),
          compute_slot(g, slot));
      continue;
    }
    if (plane == kComputePlane) {
      group.weights().gather(
          resident ? at::Tensor() : compute_slot(g, slot),
          gathers[g]);
      continue;
    }
    group.weights().gather(
        float8_plane_of(plane),
        part_in_group(part),
        resident ? at::Tensor() : float8_slot(g, plane, part, slot),
        gathers[g]);
  }
}

void UnitWeights::save_post_forward(
    const SlotView& slot,
    const SlotView& shards) const {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (const auto* shard = groups_[g]->weights().post_forward()) {
      shard->save(compute_slot(g, slot), post_forward_slot(g, shards));
    }
  }
}

}  // namespace flatshard
