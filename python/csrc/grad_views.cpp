#include "python/csrc/grad_views.h"

#include <algorithm>
#include <utility>

namespace flatshard::python {

GradViews::GradViews(
    std::shared_ptr<PyUnit> unit,
    std::vector<at::Tensor> shards,
    py::object beside)
    : unit_(std::move(unit)),
      shards_(std::move(shards)),
      beside_(std::move(beside)),
      members_(unit_->num_groups()),
      shown_(shards_.size(), WeakTensor(at::Tensor().getIntrusivePtr())) {
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    if (unit_->trainable(i)) {
      members_[unit_->group_index(i)].push_back(i);
    }
  }
}

bool GradViews::is_own(std::size_t i) const {
  // An impl that is gone keeps its address for as long as a weak pointer looks
  // at it, so no other has that.
  return grad_of(i).defined() &&
         grad_of(i).unsafeGetTensorImpl() == shown_[i]._unsafe_get_target();
}

GradViews::Indices GradViews::take() {
  Indices others;
  for (std::size_t g = 0; g < members_.size(); ++g) {
    ParamGroup& group = unit_->group_at(g);
    group.reclaim_grad();
    if (!group.has_grad()) {
      continue;
    }
    const Indices& members = members_[g];
    if (std::none_of(members.begin(), members.end(), [&](std::size_t i) {
          return grad_of(i).defined();
        })) {
      group.forget_grad();
      continue;
    }
    std::copy_if(
        members.begin(),
        members.end(),
        std::back_inserter(others),
        [&](std::size_t i) { return !is_own(i); });
  }
  return others;
}

GradViews::Indices GradViews::show() {
  Indices others;
  for (std::size_t g = 0; g < members_.size(); ++g) {
    if (!unit_->group_at(g).has_grad()) {
      continue;
    }
    for (const std::size_t i : members_[g]) {
      if (!grad_of(i).defined()) {
        show_one(i);
      } else if (!is_own(i)) {
        others.push_back(i);
      }
    }
  }
  return others;
}

void GradViews::show_one(std::size_t i) {
  const at::Tensor rows = unit_->grad(i).value();
  shards_[i].mutable_grad() = beside_(shards_[i], rows).cast<at::Tensor>();
  shown_[i] = WeakTensor(grad_of(i).getIntrusivePtr());
}

void GradViews::lend() {
  for (std::size_t g = 0; g < members_.size(); ++g) {
    unit_->group_at(g).lend_grad();
  }
}

void GradViews::drop() {
  for (const at::Tensor& shard : shards_) {
    shard.mutable_grad() = at::Tensor();
  }
}

}  // namespace flatshard::python
