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
      stages_(unit_->num_groups(), Stage::waits) {
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
      // What is there is the user's to add again: hooks take the gradient of
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
      } else {
        own.zero_();
      }
      show_one(i);
    }
  }
}

void GradViews::show() {
  for (std::size_t g = 0; g < members_.size(); ++g) {
    if (stages_[g] == Stage::shown ||
        !unit_->group_at(g).gradients().reduced().exists()) {
      continue;
    }
    show_group(g);
  }
  release();
  const std::vector<Stage> stages = stages_;
  end_backward();
  for (std::size_t g = 0; g < stages.size(); ++g) {
    if (stages[g] == Stage::reduced &&
        unit_->group_at(g).gradients().reduced().exists()) {
      run_hooks(g);
    }
  }
}

void GradViews::show_reduced() {
  for (std::size_t g = 0; g < members_.size(); ++g) {
    ParamGroup& group = unit_->group_at(g);
    if (members_[g].empty()) {
      continue;
    }
    stages_[g] = Stage::reduced;
    if (!group.gradients().contributed()) {
      continue;
    }
    stages_[g] = Stage::shown;
    show_group(g);
    const at::Tensor& flat = group.gradients().reduced().local();
    // A hook that drops the last .grad frees this while its kernels run on
    // another stream than the one that allocates.
    keep_for_current_stream(flat);
    group.gradients().reduced().give_up();
    run_hooks(g);
  }
}

void GradViews::end_backward() {
  std::fill(stages_.begin(), stages_.end(), Stage::waits);
}

void GradViews::show_group(std::size_t g) {
  for (const std::size_t i : members_[g]) {
    if (is_own(i) || !is_trained(i)) {
      continue;
    }
    if (has_hooks(i)) {
      run_tensor_hooks(i);
    }
    if (grad_of(i).defined()) {
      const at::NoGradGuard no_grad;
      unit_->grad(i).value().add_(users_rows(i));
    }
    show_one(i);
  }
}

// Not by the hooks' own operator: it takes what a hook returns for a tensor.
void GradViews::run_hooks(std::size_t g) {
  for (const std::size_t i : members_[g]) {
    if (!is_trained(i) ||
        torch::autograd::impl::post_acc_grad_hooks(shards_[i]) == nullptr) {
      continue;
    }
    const py::object shard = py::cast(shards_[i]);
    const py::object hooks = shard.attr("_post_accumulate_grad_hooks");
    if (hooks.is_none()) {
      continue;
    }
    for (const py::handle& hook : py::list(hooks.attr("values")())) {
      hook(shard);
    }
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
