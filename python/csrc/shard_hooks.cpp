#include "python/csrc/shard_hooks.h"

#include "python/csrc/bind.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace flatshard::python {
namespace {

// Null unless the program keeps it, as it has to for hooks on it.
auto accumulator_of(const at::Tensor& shard) {
  return torch::autograd::impl::try_get_grad_accumulator(shard);
}

}  // namespace

bool has_tensor_hooks(const at::Tensor& shard) {
  if (!torch::autograd::impl::hooks(shard).empty()) {
    return true;
  }
  const auto accumulator = accumulator_of(shard);
  return accumulator && !accumulator->pre_hooks().empty();
}

at::Tensor run_tensor_hooks(const at::Tensor& shard, const at::Tensor& grad) {
  torch::autograd::variable_list found{grad};
  for (const auto& hook : torch::autograd::impl::hooks(shard)) {
    found = (*hook)(found);
  }
  if (const auto accumulator = accumulator_of(shard)) {
    for (const auto& hook : accumulator->pre_hooks()) {
      found = (*hook)(found);
    }
  }
  return found[0];
}

bool has_post_hooks(const at::Tensor& shard) {
  if (!shard.requires_grad()) {
    return false;
  }
  if (torch::autograd::impl::post_acc_grad_hooks(shard) != nullptr) {
    return true;
  }
  const auto accumulator = accumulator_of(shard);
  return accumulator && !accumulator->post_hooks().empty();
}

void run_post_hooks(const at::Tensor& tensor) {
  if (torch::autograd::impl::post_acc_grad_hooks(tensor) != nullptr) {
    const py::object shard = py::cast(tensor);
    // Not by the hooks' own operator: it treats what a hook returns as a
    // tensor.
    const py::object hooks = shard.attr("_post_accumulate_grad_hooks");
    if (!hooks.is_none()) {
      for (const py::handle& hook : py::list(hooks.attr("values")())) {
        hook(shard);
      }
    }
  }
  if (const auto accumulator = accumulator_of(tensor)) {
    for (const auto& hook : accumulator->post_hooks()) {
      (*hook)({}, {tensor.grad()});
    }
  }
}

}  // namespace flatshard::python
