#include "python/csrc/grad_views.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard::python {

GradViews::GradViews(
    std::shared_ptr<PyUnit> unit,
    std::vector<at::Tensor> shards,
    py::object beside,
    py::object rows_of)
    : unit_(std::move(unit)),
      shards_(std::move(shards)),
      beside_(std::move(beside)),
      rows_of_(std::move(rows_of)),
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

void GradViews::take() {
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
    for (const std::size_t i : members) {
      if (is_own(i)) {
        continue;
      }
      const at::NoGradGuard no_grad;
      const at::Tensor own = unit_->grad(i).value();
      if (grad_of(i).defined()) {
        own.copy_(users_rows(i));
      } else {
        own.zero_();
      }
      show_one(i);
    }
  }
}

void GradViews::show() {
  for (std::size_t g = 0; g < members_.size(); ++g) {
    if (!unit_->group_at(g).has_grad()) {
      continue;
    }
    for (const std::size_t i : members_[g]) {
      if (is_own(i)) {
        continue;
      }
      if (grad_of(i).defined()) {
        const at::NoGradGuard no_grad;
        unit_->grad(i).value().add_(users_rows(i));
      }
      show_one(i);
    }
  }
  lend();
}

at::Tensor GradViews::users_rows(std::size_t i) const {
  return rows_of_(shards_[i], grad_of(i)).cast<at::Tensor>();
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
