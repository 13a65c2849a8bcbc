#include "flatshard/nn/rms_norm.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/nn/cpu_kernels.h"
#include "flatshard/nn/cuda_ops.h"

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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

struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  enum Input { kX, kDelta, kWeight };

  static variable_list forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      const std::optional<at::Tensor>& maybe_delta,
      const at::Tensor& weight,
      double eps,
      bool wants_sum,
      const ModuleContextPtr& context) {
    const at::Tensor delta = maybe_delta.value_or(at::Tensor());
    save_context(ctx, context);
    ctx->saved_data["delta"] = delta.defined();
    ctx->set_materialize_grads(false);
    const at::Tensor rows = as_rows(x).contiguous();
    at::Tensor y;
    at::Tensor sum;
    at::Tensor rstd;
    if (cuda::takes(x)) {
      std::tie(y, sum, rstd) = cuda::rms_norm_forward(
          rows,
          delta.defined() ? as_rows(delta).contiguous() : delta,
          weight.contiguous(),
          eps);
    } else {
      if (delta.defined()) {
        sum = rows + as_rows(delta);
      }
      std::tie(y, rstd) = forward_rows(sum.defined() ? sum : rows, weight, eps);
    }
    y = reshape_result(y, x.sizes());
    if (!wants_sum) {
      ctx->save_for_backward({x, weight, rstd});
      return {y};
    }
    // Without delta another tensor over x's memory: autograd would take x
    // itself for an identity.
    sum = reshape_result(sum.defined() ? sum : x, x.sizes());
    ctx->save_for_backward({sum, weight, rstd});
    return {y, sum};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("RMSNorm");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &rstd = saved[2];
    variable_list out(6);
    const at::Tensor dsum = grads.size() > 1 ? grads[1] : at::Tensor();
    if (!grads[0].defined()) {  // only the sum was used
      out[kX] = dsum;
      if (ctx->saved_data["delta"].toBool()) {
        out[kDelta] = dsum;
      }
      return out;
    }
    const at::Tensor rows = as_rows(x).contiguous();
    const at::Tensor dy = as_rows(grads[0]).contiguous();
    const at::Tensor ds =
        dsum.defined() ? as_rows(dsum).contiguous() : at::Tensor();
    const bool on_cuda = cuda::takes(x);
    at::Tensor dx;
    at::Tensor dw;
    std::tie(dx, dw) =
        on_cuda
            ? cuda::rms_norm_backward(dy, ds, rows, weight.contiguous(), rstd)
            : backward_rows(dy, ds, rows, weight, rstd);
    out[kX] = dx.view(x.sizes());
    // Edges count defined tensors only.
    const bool has_delta = ctx->saved_data["delta"].toBool();
    if (has_delta && ctx->needs_input_grad(kDelta)) {
      out[kDelta] = out[kX];
    }
    if (ctx->needs_input_grad(has_delta ? kWeight : kDelta)) {
      const auto write = [&](at::Tensor& grad, bool accumulate) {
        if (on_cuda) {
          cuda::rms_norm_weight_gradient(dw, grad, accumulate);
        } else {
          accumulate ? grad.add_(dw) : grad.copy_(dw);
        }
      };
      const auto compute = [&] {
        at::Tensor grad = at::empty_like(weight);
        write(grad, false);
        return grad;
      };
      out[kWeight] = deliver_wgrad(saved_context(ctx), weight, compute, write);
    }
    return out;
  }
};

void check_shapes(const at::Tensor& x, const at::Tensor& weight) {
  FLATSHARD_CHECK(
      x.dim() >= 1 && weight.dim() == 1 && x.size(-1) == weight.size(0),
      usage,
      "rms_norm: expected x of [..., {}], got {}",
      weight.numel(),
      c10::str(x.sizes()));
}

}  // namespace

at::Tensor rms_norm(
    const at::Tensor& x,
    const at::Tensor& weight,
    double eps,
    const ModuleContextPtr& context) {
  check_shapes(x, weight);
  return RmsNormFunction::apply(
      x,
      std::nullopt,
      weight,
      eps,
      /*wants_sum=*/false,
      context)[0];
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(
    const at::Tensor& x,
    const at::Tensor& delta,
    const at::Tensor& weight,
    double eps,
    const ModuleContextPtr& context) {
  check_shapes(x, weight);
  FLATSHARD_CHECK(
      !delta.defined() || (x.sizes() == delta.sizes() &&
                           x.scalar_type() == delta.scalar_type()),
      usage,
      "add_rms_norm: expected delta like x {}, got {}",
      c10::str(x.sizes()),
      c10::str(delta.sizes()));
  const variable_list out = RmsNormFunction::apply(
      x,
      as_optional(delta),
      weight,
      eps,
      /*wants_sum=*/true,
      context);
  return {out[1], out[0]};
}

RmsNormImpl::RmsNormImpl(std::int64_t dim, double eps)
    : Module("RmsNorm"), eps_(eps) {
  weight_ = declare_parameter("weight", {dim}, InitSpec::ones());
}

at::Tensor RmsNormImpl::forward(const at::Tensor& x) {
  return rms_norm(x, weight_, eps_, context());
}

std::tuple<at::Tensor, at::Tensor> RmsNormImpl::forward(
    const at::Tensor& x,
    const at::Tensor& delta) {
  return add_rms_norm(x, delta, weight_, eps_, context());
}

}  // namespace flatshard::nn
