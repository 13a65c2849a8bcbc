#include "python/csrc/grad_views.h"

#include "flatshard/device/memory.h"
#include "python/csrc/shard_hooks.h"

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
      shown_(shards_.size()),
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
  return grad_of(i).defined() && grad_of(i).unsafeGetTensorImpl() ==
                                     shown_[i].tensor._unsafe_get_target();
}

bool GradViews::is_kept_by_user(std::size_t i) const {
  return !is_own(i) && !shown_[i].memory.expired();
}

void GradViews::leave_to_user(std::size_t g) {
  for (const std::size_t i : members_[g]) {
    shown_[i] = {};
  }
  unit_->group_at(g).gradients().reduced().drop();
}

void GradViews::begin_backward() {
  for (std::size_t g = 0; g < members_.size(); ++g) {
    unit_->group_at(g).gradients().forget_contributions();
  }
  reclaim();
}

std::vector<std::size_t> GradViews::take() {
  const at::NoGradGuard no_grad;
  std::vector<std::size_t> without;
  for (std::size_t g = 0; g < members_.size(); ++g) {
    ReducedGradient& reduced = unit_->group_at(g).gradients().reduced();
    reduced.take_back();
    const Indices& members = members_[g];
    const auto has_grad = [&](std::size_t i) { return grad_of(i).defined(); };
    if (std::ranges::none_of(members, has_grad)) {
      leave_to_user(g);
      continue;
    }
    if (!reduced.exists() || std::ranges::any_of(members, [&](std::size_t i) {
          return is_kept_by_user(i);
        })) {
      leave_to_user(g);
      reduced.make_space(/*is_last=*/false);
      reduced.local().zero_();
    }
    for (const std::size_t i : members) {
      if (!has_grad(i)) {
        without.push_back(i);
      }
      if (is_own(i) || !is_trained(i)) {
        continue;
      }
      const at::Tensor rows = unit_->grad(i).value();
      has_grad(i) ? rows.copy_(users_rows(i)) : rows.zero_();
    }
  }
  return without;
}

void GradViews::reclaim() {
  for (std::size_t g = 0; g < members_.size(); ++g) {
    ParamGroup& group = unit_->group_at(g);
    group.gradients().reduced().take_back();
    if (!group.gradients().reduced().exists()) {
      continue;
    }
    const Indices& members = members_[g];
    // Hooks get only the gradient of the backward that starts.
    if (std::ranges::none_of(
            members,
            [&](std::size_t i) { return grad_of(i).defined(); }) ||
        std::ranges::any_of(members, [&](std::size_t i) {
          return has_tensor_hooks(shards_[i]) || is_kept_by_user(i);
        })) {
      leave_to_user(g);
      continue;
    }
    for (const std::size_t i : members) {
      if (is_own(i) || !is_trained(i)) {
        continue;
      }
      const at::NoGradGuard no_grad;
      shown_[i] = {};
      unit_->grad(i).value().zero_();
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
  if (is_own(i) || !is_trained(i) || !is_used(i)) {
    return;
  }
  if (has_tensor_hooks(shards_[i])) {
    run_tensor_hooks(i);
  }
  if (!grad_of(i).defined()) {
    show_one(i);
    return;
  }
  const at::NoGradGuard no_grad;
  // Read by the attribute, because it shards what autograd put there.
  const py::object users = py::cast(shards_[i]).attr("grad");
  users.attr("add_")(beside_(shards_[i], unit_->grad(i).value()));
}

void GradViews::run_hooks(std::size_t i) {
  if (is_trained(i) && is_used(i)) {
    run_post_hooks(shards_[i]);
  }
}

void GradViews::run_tensor_hooks(std::size_t i) {
  const at::NoGradGuard no_grad;
  const at::Tensor rows = unit_->grad(i).value();
  const at::Tensor grad = beside_(shards_[i], rows).cast<at::Tensor>();
  const at::Tensor found =
      flatshard::python::run_tensor_hooks(shards_[i], grad);
  if (!found.is_same(grad)) {
    rows.copy_(rows_of_(shards_[i], found).cast<at::Tensor>());
  }
}

at::Tensor GradViews::users_rows(std::size_t i) const {
  const py::object users = py::cast(shards_[i]).attr("grad");
  return rows_of_(shards_[i], users).cast<at::Tensor>();
}

void GradViews::show_one(std::size_t i) {
  const at::Tensor rows = unit_->grad(i).value();
  shards_[i].mutable_grad() = beside_(shards_[i], rows).cast<at::Tensor>();
  shown_[i] = {
      .tensor = WeakTensor(grad_of(i).getIntrusivePtr()),
      .memory = WeakStorage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
          rows.storage().unsafeGetStorageImpl()))};
}

void GradViews::release() {
  for (std::size_t g = 0; g < members_.size(); ++g) {
    unit_->group_at(g).gradients().reduced().give_up();
  }
}

void GradViews::drop() {
  end_backward();
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    if (grad_of(i).defined() && !is_own(i)) {
      py::cast(grad_of(i)).attr("zero_")();
    } else {
      shards_[i].mutable_grad() = at::Tensor();
    }
  }
}

}  // namespace flatshard::python
