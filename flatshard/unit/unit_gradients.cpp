#include "flatshard/unit/unit_gradients.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace flatshard {

UnitGradients::UnitGradients(
    const UnitGroups& groups,
    UnitParameters& parameters,
    bool writes_in_place)
    : groups_(groups),
      parameters_(parameters),
      writes_in_place_(writes_in_place) {
  for (const auto& group : groups_) {
    padding_.push_back(group->layout().padding_ranges());
    offsets_.push_back(nbytes_);
    if (group->trainable()) {
      const auto size = c10::elementSize(group->options().precision.reduce);
      nbytes_ +=
          align_slot(group->layout().numel() * static_cast<std::int64_t>(size));
    }
  }
}

bool UnitGradients::has_unreduced() const {
  return std::ranges::any_of(groups_, [](const auto& group) {
    return group->gradients().has_unreduced();
  });
}

at::Tensor UnitGradients::view(const SlotView& slot, const UnitParameter& p)
    const {
  const ParamGroup& group = *groups_[p.group];
  const at::ScalarType dtype = group.options().precision.reduce;
  return slot.tensor(
      offsets_[p.group] + p.offset(group, dtype),
      p.tensor.sizes(),
      dtype);
}

at::Tensor UnitGradients::flat(const SlotView& slot, std::size_t g) const {
  const ParamGroup& group = *groups_[g];
  return slot.tensor(
      offsets_[g],
      {group.layout().numel()},
      group.options().precision.reduce);
}

void UnitGradients::finish(const SlotView& slot) {
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
      const at::Tensor place = view(slot, p);
      if (p.in_slot) {
        place.add_(p.pending_grad);
      } else {
        packed.push_back(place);
        arrived.push_back(p.pending_grad);
      }
    } else if (!p.in_slot) {
      view(slot, p).zero_();
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
        flat(slot, g).narrow(0, range.offset, range.numel).zero_();
      }
    }
  }
}

void UnitGradients::drop() {
  for (UnitParameter& p : parameters_) {
    p.in_slot = false;
    p.pending_grad = at::Tensor();
    if (p.tensor.mutable_grad().defined()) {
      p.tensor.mutable_grad() = at::Tensor();
    }
  }
}

}  // namespace flatshard
