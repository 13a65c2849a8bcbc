#include "flatshard/unit/unit_gradients.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard {

UnitGradients::UnitGradients(
    const UnitGroups& groups,
    UnitParameters& parameters,
    const UnitLayout& layout,
    bool writes_in_place)
    : groups_(groups),
      parameters_(parameters),
      layout_(layout),
      arrivals_(parameters.size()),
      writes_in_place_(writes_in_place) {
  for (const auto& group : groups_) {
    padding_.push_back(group->layout().padding_ranges());
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
  return slot
      .tensor(
          layout_.grad_offsets[p.group] + p.offset(group, dtype),
          {p.tensor.numel()},
          dtype)
      .as_strided(p.tensor.sizes(), p.tensor.strides());
}

at::Tensor UnitGradients::flat(const SlotView& slot, std::size_t g) const {
  const ParamGroup& group = *groups_[g];
  return slot.tensor(
      layout_.grad_offsets[g],
      {group.layout().numel()},
      group.options().precision.reduce);
}

nn::WgradTarget UnitGradients::target(const SlotView& slot, std::size_t index) {
  Arrival& arrival = arrivals_[index];
  arrival.goes_to_sum = false;
  return {
      view(slot, parameters_[index]),
      /*accumulate=*/arrival.is_in_slot};
}

std::optional<nn::WgradTarget> UnitGradients::sum_target(
    std::size_t index,
    bool collective,
    bool is_last,
    bool may_allocate) {
  const UnitParameter& p = parameters_[index];
  GradientPipeline& gradients = groups_[p.group]->gradients();
  if (gradients.is_reduced_to_sum(p.index)) {
    return std::nullopt;
  }
  const std::optional<GradientPipeline::OpenSum> sum =
      gradients.open_sum(collective, is_last, may_allocate);
  if (!sum) {
    return std::nullopt;
  }
  Arrival& arrival = arrivals_[index];
  arrival.goes_to_sum = true;
  return nn::WgradTarget{
      sum->flat
          .narrow(
              0,
              groups_[p.group]->layout().tensor_offset(p.index),
              p.tensor.numel())
          .as_strided(p.tensor.sizes(), p.tensor.strides()),
      /*accumulate=*/sum->add || arrival.is_in_sum};
}

void UnitGradients::add(std::size_t index, const at::Tensor& grad) {
  const at::NoGradGuard no_grad;
  // The slot that is reduced is dense: sparse embeddings' gradients become so.
  const at::Tensor dense =
      grad.layout() == at::kStrided ? grad : grad.to_dense();
  at::Tensor& pending = arrivals_[index].pending;
  pending = pending.defined() ? pending.add(dense) : dense;
}

std::size_t UnitGradients::num_pending() const {
  return std::ranges::count_if(arrivals_, [](const Arrival& arrival) {
    return arrival.pending.defined();
  });
}

void UnitGradients::finish(const SlotView& slot) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> packed;
  std::vector<at::Tensor> came;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const UnitParameter& p = parameters_[i];
    if (!groups_[p.group]->trainable()) {
      continue;
    }
    const Arrival arrival = std::exchange(arrivals_[i], {});
    const bool is_pending = arrival.pending.defined();
    GradientPipeline& gradients = groups_[p.group]->gradients();
    if (arrival.is_in_slot || arrival.is_in_sum || is_pending) {
      gradients.mark_contributed(p.index);
    }
    const bool is_in_slot = arrival.is_in_slot || is_pending;
    if (arrival.is_in_sum) {
      gradients.mark_summed(p.index, is_in_slot);
    }
    if (is_in_slot || !arrival.is_in_sum) {
      gradients.mark_reduced_to_sum(p.index);
    }
    if (is_pending && arrival.is_in_slot) {
      view(slot, p).add_(arrival.pending);
    } else if (is_pending) {
      packed.push_back(view(slot, p));
      came.push_back(arrival.pending);
    } else if (!arrival.is_in_slot && !arrival.is_in_sum) {
      view(slot, p).zero_();
    }
  }
  if (!packed.empty()) {
    at::_foreach_copy_(packed, came);
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
  arrivals_.assign(parameters_.size(), {});
  for (const auto& group : groups_) {
    group->gradients().close_sum();
  }
  for (UnitParameter& p : parameters_) {
    if (p.tensor.mutable_grad().defined()) {
      p.tensor.mutable_grad() = at::Tensor();
    }
  }
}

}  // namespace flatshard
