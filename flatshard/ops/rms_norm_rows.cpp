#include "flatshard/ops/rms_norm_rows.h"

#include <ATen/ATen.h>

#include "flatshard/ops/cpu_kernels.h"
#include "flatshard/ops/cuda_ops.h"
#include "flatshard/ops/parameter_check.h"
#include "flatshard/ops/rows.h"

namespace flatshard::nn {
namespace {

at::Tensor as_float(const at::Tensor& tensor) {
  return tensor.to(at::kFloat).contiguous();
}

// (y, rstd) of x; float32 loops on the CPU, ATen on devices without kernels.
std::tuple<at::Tensor, at::Tensor>
forward_rows(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor xf = as_float(x);
  const at::Tensor wf = as_float(weight);
  if (x.is_cpu()) {
    at::Tensor y = at::empty_like(xf);
    at::Tensor rstd = at::empty({x.size(0)}, xf.options());
    cpu::rms_norm_forward(
        xf.const_data_ptr<float>(),
        wf.const_data_ptr<float>(),
        y.mutable_data_ptr<float>(),
        rstd.mutable_data_ptr<float>(),
        x.size(0),
        x.size(1),
        static_cast<float>(eps));
    return {y.to(x.scalar_type()), rstd};
  }
  const at::Tensor rstd = xf.square().mean(-1).add_(eps).rsqrt_();
  return {(xf * rstd.unsqueeze(-1)).mul_(wf).to(x.scalar_type()), rstd};
}

// (dx, float32 dw) of rows.
std::tuple<at::Tensor, at::Tensor> backward_rows(
    const at::Tensor& dy,
    const at::Tensor& dsum,
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& rstd) {
  const at::Tensor xf = as_float(x);
  const at::Tensor wf = as_float(weight);
  const at::Tensor gf = as_float(dy);
  const at::Tensor sf = dsum.defined() ? as_float(dsum) : dsum;
  if (x.is_cpu()) {
    at::Tensor dx = at::empty_like(xf);
    at::Tensor dw = at::zeros_like(wf);
    cpu::rms_norm_backward(
        gf.const_data_ptr<float>(),
        sf.defined() ? sf.const_data_ptr<float>() : nullptr,
        xf.const_data_ptr<float>(),
        wf.const_data_ptr<float>(),
        rstd.const_data_ptr<float>(),
        dx.mutable_data_ptr<float>(),
        dw.mutable_data_ptr<float>(),
        x.size(0),
        x.size(1));
    return {dx.to(x.scalar_type()), dw};
  }
  const at::Tensor scale = rstd.unsqueeze(-1);
  const at::Tensor gw = gf * wf;
  const at::Tensor normed = xf * scale;
  at::Tensor dx = (gw - normed * (gw * normed).mean(-1, true)) * scale;
  if (sf.defined()) {
    dx += sf;
  }
  return {dx.to(x.scalar_type()), (gf * normed).sum(0)};
}

}  // namespace

void check_norm_input(
    const at::Tensor& x,
    const at::Tensor& delta,
    const at::Tensor& weight) {
  FLATSHARD_CHECK(
      x.dim() >= 1 && weight.dim() == 1 && x.size(-1) == weight.size(0),
      usage,
      "rms_norm: expected x of [..., {}], got {}",
      weight.numel(),
      c10::str(x.sizes()));
  FLATSHARD_CHECK(
      !delta.defined() || (x.sizes() == delta.sizes() &&
                           x.scalar_type() == delta.scalar_type()),
      usage,
      "add_rms_norm: expected delta like x {}, got {}",
      c10::str(x.sizes()),
      c10::str(delta.sizes()));
  check_has_memory("RmsNorm", x, weight);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm_rows(
    const at::Tensor& x,
    const at::Tensor& delta,
    const at::Tensor& weight,
    double eps) {
  const at::Tensor rows = as_rows(x).contiguous();
  const at::Tensor added =
      delta.defined() ? as_rows(delta).contiguous() : delta;
  if (cuda::supports(x)) {
    return cuda::rms_norm_forward(rows, added, weight.contiguous(), eps);
  }
  const at::Tensor sum = added.defined() ? rows + added : added;
  auto [y, rstd] = forward_rows(sum.defined() ? sum : rows, weight, eps);
  return {y, sum, rstd};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_rows_backward(
    const at::Tensor& dy,
    const at::Tensor& dsum,
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& rstd,
    at::Tensor* y,
    bool wants_weight) {
  const at::Tensor rows = as_rows(x).contiguous();
  const at::Tensor g = as_rows(dy).contiguous();
  const at::Tensor gs = dsum.defined() ? as_rows(dsum).contiguous() : dsum;
  if (cuda::supports(x)) {
    if (y != nullptr) {
      *y = g;
    }
    return cuda::rms_norm_backward(
        g,
        gs,
        rows,
        weight.contiguous(),
        rstd,
        y,
        /*amax=*/{},
        wants_weight);
  }
  if (y != nullptr) {
    *y = normed_rows(rows, weight, rstd);
  }
  return backward_rows(g, gs, rows, weight, rstd);
}

at::Tensor normed_rows(
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& rstd) {
  return (as_float(as_rows(x)) * rstd.unsqueeze(-1))
      .mul_(as_float(weight))
      .to(x.scalar_type());
}

}  // namespace flatshard::nn
