#include "flatshard/unit/unit_weights.h"

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <mutex>
#include <utility>

namespace flatshard {

UnitWeights::UnitWeights(const std::string& unit, const UnitGroups& groups)
    : groups_(groups) {
  planes_.forward_reads = {};
  planes_.backward_reads = {};
  std::size_t num_planes = 1;
  for (const auto& group : groups_) {
    resident_ = resident_ && group->weights().resident();
    num_planes = std::max(num_planes, group->weights().planes().size());
  }
  offsets_.resize(num_planes);
  planes_.weights_nbytes.resize(num_planes, 0);
  planes_.derived_from.resize(num_planes, kStored);
  planes_.part_nbytes.resize(num_planes);
  check_formats(unit);
  find_parts(unit);
  for (std::size_t plane = 0; plane < num_planes; ++plane) {
    add_plane(static_cast<PlaneId>(plane));
  }
  add_post_forward_plane();
}

// Then groups that have a plane agree on what it is.
void UnitWeights::check_formats(const std::string& unit) {
  const Float8Format* first = nullptr;
  for (const auto& group : groups_) {
    const auto& format = group->options().float8;
    if (!format) {
      continue;
    }
    first = first == nullptr ? &*format : first;
    FLATSHARD_CHECK(
        *format == *first,
        config,
        "unit {}: expected one FP8 format for its weights, got {} and {}, or "
        "other options",
        unit,
        float8::to_string(first->recipe),
        float8::to_string(format->recipe));
    planes_.gather_parts = format->gather_parts;
  }
}

void UnitWeights::find_parts(const std::string& unit) {
  std::size_t num_planes_in_parts = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    std::size_t num_parts = 0;
    std::size_t num_planes = 0;
    for (const Plane& plane : groups_[g]->weights().planes()) {
      num_parts = std::max(num_parts, plane.parts.size());
      num_planes += plane.parts.empty() ? 0 : 1;
    }
    num_planes_in_parts = std::max(num_planes_in_parts, num_planes);
    if (!groups_[g]->weights().resident()) {
      for (std::size_t part = 0; part < num_parts; ++part) {
        parts_.push_back({g, static_cast<PartId>(part)});
      }
    }
  }
  if (parts_.empty()) {
    return;
  }
  const std::size_t most =
      (PlaneSet::kMaxPlanes - offsets_.size()) / num_planes_in_parts;
  if (parts_.size() > most) {
    static std::once_flag said;
    std::call_once(said, [&] {
      log_warning(
          "unit {} has {} parts of FP8 weights; more than {} are not "
          "distinguished, so its planes are gathered whole and gather_parts "
          "has no effect there; smaller units would be gathered in parts "
          "(logged once)",
          unit,
          parts_.size(),
          most);
    });
  }
  // One part is the whole.
  if (parts_.size() < 2 || parts_.size() > most) {
    parts_.clear();
  }
}

void UnitWeights::add_plane(PlaneId plane) {
  std::int64_t& nbytes = planes_.weights_nbytes[plane];
  for (const auto& group : groups_) {
    offsets_[plane].push_back(nbytes);
    if (!group->weights().has(plane)) {
      continue;
    }
    const Plane& of_group = group->weights().planes()[plane];
    if (of_group.in_forward) {
      planes_.forward_reads.insert(plane);
    }
    if (of_group.in_backward) {
      planes_.backward_reads.insert(plane);
    }
    planes_.derived_from[plane] = of_group.source;
    if (of_group.source != kStored) {
      planes_.transient.insert(plane);
    }
    if (of_group.on_request) {
      planes_.on_request.insert(plane);
    }
    if (!group->weights().rests_whole(plane)) {
      nbytes += align_slot(of_group.whole.nbytes);
    }
  }
  if (planes_.on_request.contains(plane)) {
    nbytes = std::max(nbytes, kSlotAlignment);  // 0: never gathered
    for (const Part& part : parts_) {
      planes_.part_nbytes[plane].push_back(groups_[part.group]
                                               ->weights()
                                               .planes()[plane]
                                               .part(part.part)
                                               .nbytes);
    }
  } else {
    // A unit's parameters come and go with it, also where it has no values.
    planes_.forward_reads.insert(plane);
    planes_.backward_reads.insert(plane);
  }
}

// After the groups' planes. Parameters do not point at it.
void UnitWeights::add_post_forward_plane() {
  std::int64_t nbytes = 0;
  std::vector<std::int64_t> offsets;
  for (const auto& group : groups_) {
    offsets.push_back(nbytes);
    if (const auto* shard = group->weights().post_forward()) {
      const auto size = c10::elementSize(group->options().precision.compute);
      nbytes += align_slot(shard->numel() * static_cast<std::int64_t>(size));
    }
  }
  if (nbytes == 0) {
    return;
  }
  planes_.post_forward = static_cast<PlaneId>(offsets_.size());
  offsets_.push_back(std::move(offsets));
  planes_.weights_nbytes.push_back(nbytes);
  planes_.derived_from.push_back(kStored);
  planes_.part_nbytes.emplace_back();
}

at::Tensor UnitWeights::post_forward_slot(std::size_t g, const SlotView& shards)
    const {
  return shards.tensor(
      offsets_[planes_.post_forward][g],
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
  for (const auto& group : groups_) {
    if (resident_ && group->weights().has(kComputePlane) &&
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
      part == kWhole ? offsets_[plane][g] : 0,
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
          memory(g, planes_.derived_from[plane], part, source),
          memory(g, plane, part, slot));
    }
  }
}

PartId UnitWeights::part_of(const UnitParameter& p) const {
  const PartId in_group =
      static_cast<PartId>(groups_[p.group]->layout().spec(p.index).part);
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i].group == p.group && parts_[i].part == in_group) {
      return static_cast<PartId>(i);
    }
  }
  return kWhole;
}

// -- what layers ask for ------------------------------------------------------

std::optional<float8::Recipe> UnitWeights::recipe(
    const UnitParameter& p) const {
  const auto& format = groups_[p.group]->options().float8;
  return format ? std::optional(format->recipe) : std::nullopt;
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

float8::Plane UnitWeights::view(
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

nn::Float8Weight UnitWeights::operand(
    const UnitParameter& p,
    PlaneId plane,
    float8::Plane view) const {
  const Plane& of_group = groups_[p.group]->weights().planes()[plane];
  if (of_group.stored() && !of_group.in_forward) {
    // The exchange keeps the order of the rows, while products read the
    // transpose.
    view.data = float8::transpose_bytes(view.data);
    view.scales = view.scales.contiguous();
  }
  const Float8Format& format = *groups_[p.group]->options().float8;
  return {
      .operand = {std::move(view), format.recipe},
      .emulate = format.emulate};
}

}  // namespace flatshard
