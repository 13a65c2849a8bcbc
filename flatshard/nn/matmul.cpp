#include "flatshard/nn/matmul.h"

#include "flatshard/nn/parameter_check.h"

#include <ATen/ATen.h>

namespace flatshard::nn {

void check_linear_input(const at::Tensor& x, const at::Tensor& weight) {
  FLATSHARD_CHECK(
      x.dim() >= 1 && x.size(-1) == weight.size(1),
      usage,
      "linear: expected x of [..., {}], got {}",
      weight.size(1),
      c10::str(x.sizes()));
  check_has_memory("Linear", x, weight);
  check_same_dtype("Linear", x, weight);
}

at::Tensor matmul_forward(
    const at::Tensor& rows,
    const at::Tensor& weight,
    const at::Tensor& bias,
    const at::Tensor& residual) {
  const at::Tensor wt = weight.t();
  if (!residual.defined()) {
    return bias.defined() ? at::addmm(bias, rows, wt) : at::mm(rows, wt);
  }
  const at::Tensor y = at::addmm(residual, rows, wt);
  return bias.defined() ? y.add_(bias) : y;
}

void add_input_gradient(
    at::Tensor& dx,
    const at::Tensor& g,
    const at::Tensor& weight) {
  if (!dx.defined()) {
    dx = at::mm(g, weight);
  } else if (at::GradMode::is_enabled()) {
    dx = at::addmm(dx, g, weight);
  } else {
    at::addmm_out(dx, dx, g, weight);
  }
}

at::Tensor deliver_matmul_wgrad(
    const ModuleContextPtr& context,
    const at::Tensor& weight,
    const at::Tensor& g,
    const at::Tensor& rows) {
  const auto compute = [&] { return at::mm(g.t(), rows); };
  return deliver_wgrad(
      context,
      weight,
      compute,
      [&](at::Tensor& grad, bool accumulate) {
        if (grad.scalar_type() != g.scalar_type()) {
          accumulate ? grad.add_(compute()) : grad.copy_(compute());
        } else if (accumulate) {
          at::addmm_out(grad, grad, g.t(), rows);
        } else {
          at::mm_out(grad, g.t(), rows);
        }
      });
}

}  // namespace flatshard::nn
