#include "flatshard/unit/unit.h"

#include "flatshard/core/error.h"
#include "flatshard/nn/module.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

constexpr std::int64_t kGroupAlignment = 256;

std::int64_t align_up(std::int64_t n) {
  return (n + kGroupAlignment - 1) / kGroupAlignment * kGroupAlignment;
}

}  // namespace

Unit::Unit(
    UnitId id,
    std::string name,
    nn::Module* module,
    std::vector<std::unique_ptr<ParamGroup>> groups,
    std::vector<UnitParameter> parameters)
    : id_(id),
      name_(std::move(name)),
      module_(module),
      groups_(std::move(groups)),
      parameters_(std::move(parameters)),
      writes_in_place_(module != nullptr) {
  weights_offset_.resize(3);
  for (const auto& group : groups_) {
    const Precision& precision = group->options().precision;
    const std::int64_t numel = group->layout().numel();
    padding_.push_back(group->layout().padding_ranges());
    weights_offset_[kComputePlane].push_back(weights_nbytes_);
    resident_ = resident_ && group->weights().resident();
    if (!group->weights().resident() && !group->weights().float8()) {
      weights_nbytes_ += align_up(numel * c10::elementSize(precision.compute));
    }
    grads_offset_.push_back(grads_nbytes_);
    if (group->trainable()) {
      grads_nbytes_ += align_up(numel * c10::elementSize(precision.reduce));
    }
  }
  planes_.weights_nbytes = {weights_nbytes_};
  add_float8_planes();
  point_residents();
}

bool Unit::has_unreduced_grad() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& group) {
    return group->gradients().has_unreduced();
  });
}

std::int64_t Unit::generation() const {
  std::int64_t sum = 0;
  for (const auto& group : groups_) {
    sum += group->weights().version();
  }
  return sum;
}

UnitSpec Unit::spec(UnitId parent, UnitPolicy policy) const {
  UnitSpec spec = planes_;
  spec.name = name_;
  spec.parent = parent;
  spec.resident = resident();
  spec.transient = transient_;
  for (const auto& group : groups_) {
    if (spec.resident && !group->weights().float8() &&
        group->weights().has_refresh()) {
      spec.weights_nbytes[kComputePlane] += group->weights().compute().nbytes();
    }
  }
  spec.grad_nbytes = grads_nbytes_;
  spec.policy = std::move(policy);
  spec.grads_in_place = writes_in_place_;
  spec.reduce_every_microbatch = false;
  for (const auto& group : groups_) {
    const Placements& gradient = group->strategy().gradient;
    if (group->trainable() && num_sharded_axes(gradient) > 0) {
      spec.reduce_every_microbatch = true;
    }
  }
  return spec;
}

std::int64_t Unit::offset_in_group(const UnitParameter& p, at::ScalarType dtype)
    const {
  return groups_[p.group]->layout().tensor_offset(p.index) *
         static_cast<std::int64_t>(c10::elementSize(dtype));
}

void Unit::gather_into(
    const SlotView& slot,
    PlaneId plane,
    PartId part,
    const std::vector<WeightPlanes::Gather>& gathers) const {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    ParamGroup& group = *groups_[g];
    if (!is_in_plane(group, plane) ||
        (part != kWhole && parts_[part].group != g)) {
      continue;
    }
    const bool resident = group.weights().resident();
    if (plane == kComputePlane) {
      group.weights().gather(
          resident ? at::Tensor()
                   : slot.tensor(
                         weights_offset_[plane][g],
                         {group.layout().numel()},
                         group.options().precision.compute),
          gathers[g]);
      continue;
    }
    const auto float8_plane =
        plane == kRowPlane ? Float8Planes::kRows : Float8Planes::kColumns;
    group.weights().gather(
        float8_plane,
        part == kWhole ? Float8Planes::kWhole : parts_[part].part,
        resident ? at::Tensor() : float8_slot(g, plane, part, slot),
        gathers[g]);
  }
}

void Unit::check_storage() const {
  for (const UnitParameter& p : parameters_) {
    FLATSHARD_CHECK(
        p.storage.is_intact(),
        usage,
        "parameter {} of unit {} was given another storage (`p.data = x` or "
        "`set_`); write into the shards of its group with copy_ instead "
        "(Runtime::all_groups, ParamGroup::main_shards)",
        p.name,
        name_);
  }
}

void Unit::point_at(const SlotView& slot) {
  check_storage();
  for (UnitParameter& p : parameters_) {
    const ParamGroup& group = *groups_[p.group];
    if (group.weights().float8()) {
      continue;  // it has no values of its own
    }
    if (!group.weights().resident()) {
      p.storage.point_at(slot.at(
          weights_offset_[kComputePlane][p.group] +
          offset_in_group(p, group.options().precision.compute)));
    } else if (!revealed_) {
      p.storage.reveal();
    }
  }
  revealed_ = true;
}

void Unit::clear() {
  for (UnitParameter& p : parameters_) {
    if (!groups_[p.group]->weights().resident()) {
      p.storage.clear();
    }
  }
  revealed_ = revealed_ && has_residents_;
}

void Unit::point_residents() {
  for (UnitParameter& p : parameters_) {
    const ParamGroup& group = *groups_[p.group];
    if (group.weights().resident() && !group.weights().float8()) {
      has_residents_ = true;
      const at::Tensor& flat = group.weights().compute().local();
      const SlotView whole{.data = flat.data_ptr()};
      p.storage.point_at(whole.at(offset_in_group(p, flat.scalar_type())));
    }
  }
}

void Unit::hide() {
  if (module_ != nullptr && revealed_) {
    revealed_ = false;
    for (const UnitParameter& p : parameters_) {
      p.storage.hide();
    }
  }
}

void Unit::reveal() {
  if (!revealed_) {
    revealed_ = true;
    for (const UnitParameter& p : parameters_) {
      if (!groups_[p.group]->weights().float8()) {
        p.storage.reveal();
      }
    }
  }
}

at::Tensor Unit::grad_view(const SlotView& slot, const UnitParameter& p) const {
  const at::ScalarType dtype = groups_[p.group]->options().precision.reduce;
  return slot.tensor(
      grads_offset_[p.group] + offset_in_group(p, dtype),
      p.tensor.sizes(),
      dtype);
}

at::Tensor Unit::grad_flat(const SlotView& slot, std::size_t g) const {
  const ParamGroup& group = *groups_[g];
  return slot.tensor(
      grads_offset_[g],
      {group.layout().numel()},
      group.options().precision.reduce);
}

void Unit::finish_grads(const SlotView& slot) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> packed;
  std::vector<at::Tensor> arrived;
  for (UnitParameter& p : parameters_) {
    if (!groups_[p.group]->trainable()) {
      continue;
    }
    if (p.in_slot || p.pending_grad.defined()) {
      groups_[p.group]->gradients().mark_contributed();
    }
    if (p.pending_grad.defined()) {
      const at::Tensor view = grad_view(slot, p);
      if (p.in_slot) {
        view.add_(p.pending_grad);
      } else {
        packed.push_back(view);
        arrived.push_back(p.pending_grad);
      }
    } else if (!p.in_slot) {
      grad_view(slot, p).zero_();
    }
    p.in_slot = false;
    p.pending_grad = at::Tensor();
  }
  if (!packed.empty()) {
    at::_foreach_copy_(packed, arrived);
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g]->trainable()) {
      for (const FlatRange& range : padding_[g]) {
        grad_flat(slot, g).narrow(0, range.offset, range.numel).zero_();
      }
    }
  }
}

void Unit::drop_grads() {
  for (UnitParameter& p : parameters_) {
    p.in_slot = false;
    p.pending_grad = at::Tensor();
    if (p.tensor.mutable_grad().defined()) {
      p.tensor.mutable_grad() = at::Tensor();
    }
  }
}

}  // namespace flatshard
