// A unit's FP8 planes: what lies where in their slots, and how products read
// it.
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/unit/unit_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <mutex>

namespace flatshard {

void UnitWeights::add_float8_planes(const std::string& unit) {
  const Float8Planes* first = nullptr;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const Float8Planes* planes = groups_[g]->weights().float8();
    if (planes == nullptr) {
      continue;
    }
    first = first == nullptr ? planes : first;
    FLATSHARD_CHECK(
        planes->format() == first->format(),
        config,
        "unit {}: expected one FP8 format for its weights, got {} and {}, or "
        "other options",
        unit,
        float8::to_string(first->format().recipe),
        float8::to_string(planes->format().recipe));
    if (!groups_[g]->weights().resident() && planes->format().cut_in_parts) {
      for (int part = 0; part < planes->num_parts(); ++part) {
        parts_.push_back({g, part});
      }
    }
  }
  if (first == nullptr) {
    return;
  }
  planes_.weights_nbytes.resize(3, 0);
  planes_.forward_reads = {kComputePlane, kRowPlane};
  planes_.backward_reads = {kComputePlane, kColumnPlane};
  planes_.on_request = {kRowPlane, kColumnPlane};
  planes_.derived_from = {
      kStored,
      kStored,
      first->stores(Float8Planes::kColumns) ? kStored : kRowPlane};
  if (!first->stores(Float8Planes::kColumns)) {
    transient_ = {kColumnPlane};
  }
  // Two planes have them; one part is the whole.
  constexpr std::size_t kMaxParts = (PlaneSet::kMaxPlanes - 3) / 2;
  if (parts_.size() > kMaxParts) {
    static std::once_flag said;
    std::call_once(said, [&] {
      log_warning(
          "unit {} has {} parts of FP8 weights; more than {} are not told "
          "apart, so its planes are gathered whole and gather_parts has no "
          "effect there; smaller units would be gathered in parts (logged "
          "once)",
          unit,
          parts_.size(),
          kMaxParts);
    });
  }
  if (parts_.size() < 2 || parts_.size() > kMaxParts) {
    parts_.clear();
  }
  planes_.part_nbytes.resize(3);
  for (const PlaneId plane : {kRowPlane, kColumnPlane}) {
    const auto of = float8_plane_of(plane);
    std::int64_t& nbytes = planes_.weights_nbytes[plane];
    for (const auto& group : groups_) {
      const Float8Planes* planes = group->weights().float8();
      offsets_[plane].push_back(nbytes);
      if (planes != nullptr && !planes->rests_whole(of)) {
        nbytes += align_slot(planes->slot_nbytes(of));
      }
    }
    nbytes = std::max(nbytes, kSlotAlignment);  // 0: never gathered
    for (const Part& part : parts_) {
      planes_.part_nbytes[plane].push_back(
          groups_[part.group]->weights().float8()->slot_nbytes(of, part.part));
    }
  }
}

PartId UnitWeights::part_of(const UnitParameter& p) const {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i].group == p.group &&
        groups_[p.group]->weights().float8()->part_of(p.index) ==
            parts_[i].part) {
      return static_cast<PartId>(i);
    }
  }
  return kWhole;
}

at::Tensor UnitWeights::float8_slot(
    std::size_t g,
    PlaneId plane,
    PartId part,
    const SlotView& slot) const {
  const auto of = float8_plane_of(plane);
  const Float8Planes& planes = *groups_[g]->weights().float8();
  if (planes.rests_whole(of)) {
    return planes.resting(of);
  }
  return slot.tensor(
      part == kWhole ? offsets_[plane][g] : 0,
      {planes.slot_nbytes(of, part_in_group(part))},
      at::kByte);
}

void UnitWeights::derive_into(
    PartId part,
    const SlotView& rows,
    const SlotView& columns) const {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const Float8Planes* planes = groups_[g]->weights().float8();
    if (planes == nullptr || !is_in_part(g, part)) {
      continue;
    }
    planes->derive(
        part_in_group(part),
        float8_slot(g, kRowPlane, part, rows),
        float8_slot(g, kColumnPlane, part, columns));
  }
}

float8::Plane UnitWeights::float8_view(
    const UnitParameter& p,
    PlaneId plane,
    PartId part,
    const SlotView& slot) const {
  const Float8Planes& planes = *groups_[p.group]->weights().float8();
  const bool resident = groups_[p.group]->weights().resident();
  return planes.view(
      float8_plane_of(plane),
      p.index,
      resident ? Float8Planes::kWhole : part_in_group(part),
      float8_slot(p.group, plane, part, slot));
}

float8::Operand UnitWeights::float8_operand(
    const UnitParameter& p,
    PlaneId plane,
    PartId part,
    const SlotView& slot) const {
  const Float8Planes& planes = *groups_[p.group]->weights().float8();
  float8::Plane view = float8_view(p, plane, part, slot);
  if (plane == kColumnPlane && planes.stores(Float8Planes::kColumns)) {
    // It travelled as the rows lie; products read the transpose.
    view.data = float8::transpose_bytes(view.data);
    view.scales = view.scales.contiguous();
  }
  return {std::move(view), planes.format().recipe};
}

}  // namespace flatshard
