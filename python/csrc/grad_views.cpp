#include "python/csrc/grad_views.h"

#include "flatshard/device/memory.h"

#include <ATen/ATen.h>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

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
      shown_(shards_.size(), WeakTensor(at::Tensor().getIntrusivePtr())),
      progress_(unit_->num_groups()) {
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

void GradViews::begin_backward() {
  for (std::size_t g = 0; g < members_.size(); ++g) {
    unit_->group_at(g).gradients().forget_contributions();
  }
  take();
}

void GradViews::take() {
  for (std::size_t g = 0; g < members_.size(); ++g) {
    ParamGroup& group = unit_->group_at(g);
    group.gradients().reduced().take_back();
    if (!group.gradients().reduced().exists()) {
      continue;
    }
    const Indices& members = members_[g];
    if (std::none_of(members.begin(), members.end(), [&](std::size_t i) {
          return grad_of(i).defined();
        })) {
      group.gradients().reduced().drop();
      continue;
    }
    if (std::any_of(members.begin(), members.end(), [&](std::size_t i) {
          return has_hooks(i);
        })) {
      // The user adds an existing gradient again: hooks take the gradient of
      // the backward that begins, and no other.
      for (const std::size_t i : members) {
        shown_[i] = WeakTensor(at::Tensor().getIntrusivePtr());
      }
      group.gradients().reduced().drop();
      continue;
    }
    for (const std::size_t i : members) {
      if (is_own(i) || !is_trained(i)) {
        continue;
      }
      const at::NoGradGuard no_grad;
      const at::Tensor own = unit_->grad(i).value();
      if (grad_of(i).defined()) {
        own.copy_(users_rows(i));
        show_one(i);
      } else {
        own.zero_();
      }
    }
  }
}

void GradViews::show() {
  Indices run;
  for (std::size_t g = 0; g < members_.size(); ++g) {
    const auto& [stage, late, flat] = progress_[g];
    ReducedGradient& reduced = unit_->group_at(g).gradients().reduced();
    if (!late.empty()) {
      reduced.take_back();
    }
    const Indices& due = stage == Stage::shown ? late : members_[g];
    if (due.empty() || !reduced.exists()) {
      continue;
    }
    for (const std::size_t i : due) {
      show_parameter(i);
    }
    if (stage != Stage::waits) {
      run.insert(run.end(), due.begin(), due.end());
    }
  }
  release();
  end_backward();
  for (const std::size_t i : run) {
    run_hooks(i);
  }
}

void GradViews::show_reduced() {
  for (std::size_t g = 0; g < members_.size(); ++g) {
    ParamGroup& group = unit_->group_at(g);
    if (members_[g].empty()) {
      continue;
    }
    Progress& progress = progress_[g];
    progress = {.stage = Stage::reduced};
    if (!group.gradients().contributed()) {
      continue;
    }
    progress.stage = Stage::shown;
    for (const std::size_t i : members_[g]) {
      if (is_used(i)) {
        show_parameter(i);
      } else if (is_trained(i)) {
        progress.late.push_back(i);
      }
    }
    const at::Tensor& flat = group.gradients().reduced().local();
    // A hook that drops the last .grad frees this while its kernels run on
    // another stream than the one that allocates.
    keep_for_current_stream(flat);
    if (!progress.late.empty()) {
      progress.flat = flat;
    }
    group.gradients().reduced().give_up();
    for (const std::size_t i : members_[g]) {
      run_hooks(i);
    }
  }
}

void GradViews::end_backward() {
  std::fill(progress_.begin(), progress_.end(), Progress());
}

bool GradViews::is_used(std::size_t i) const {
  const ParamGroup& group = unit_->group_at(unit_->group_index(i));
  return group.gradients().contributed(unit_->index_in_group(i));
}

void GradViews::show_parameter(std::size_t i) {
  if (is_own(i) || !is_trained(i) || !(is_used(i) || grad_of(i).defined())) {
    return;
  }
  if (is_used(i) && has_hooks(i)) {
    run_tensor_hooks(i);
  }
  if (grad_of(i).defined()) {
    const at::NoGradGuard no_grad;
    unit_->grad(i).value().add_(users_rows(i));
  }
  show_one(i);
}

// Not by the hooks' own operator: it takes what a hook returns for a tensor.
void GradViews::run_hooks(std::size_t i) {
  if (!is_trained(i) || !is_used(i) ||
      torch::autograd::impl::post_acc_grad_hooks(shards_[i]) == nullptr) {
    return;
  }
  const py::object shard = py::cast(shards_[i]);
  const py::object hooks = shard.attr("_post_accumulate_grad_hooks");
  if (hooks.is_none()) {
    return;
  }
  for (const py::handle& hook : py::list(hooks.attr("values")())) {
    hook(shard);
  }
}

bool GradViews::has_hooks(std::size_t i) const {
  return !torch::autograd::impl::hooks(shards_[i]).empty();
}

void GradViews::run_tensor_hooks(std::size_t i) {
  const at::NoGradGuard no_grad;
  const at::Tensor rows = unit_->grad(i).value();
  const at::Tensor grad = beside_(shards_[i], rows).cast<at::Tensor>();
  torch::autograd::variable_list found{grad};
  for (const auto& hook : torch::autograd::impl::hooks(shards_[i])) {
    found = (*hook)(found);
  }
  if (!found[0].is_same(grad)) {
    rows.copy_(rows_of_(shards_[i], found[0]).cast<at::Tensor>());
  }
}

at::Tensor GradViews::users_rows(std::size_t i) const {
  return rows_of_(shards_[i], grad_of(i)).cast<at::Tensor>();
}

void GradViews::show_one(std::size_t i) {
  const at::Tensor rows = unit_->grad(i).value();
  shards_[i].mutable_grad() = beside_(shards_[i], rows).cast<at::Tensor>();
  shown_[i] = WeakTensor(grad_of(i).getIntrusivePtr());
}

void GradViews::release() {
  for (std::size_t g = 0; g < members_.size(); ++g) {
    unit_->group_at(g).gradients().reduced().give_up();
  }
}

void GradViews::drop() {
  end_backward();
  for (const at::Tensor& shard : shards_) {
    shard.mutable_grad() = at::Tensor();
  }
}

}  // namespace flatshard::python
