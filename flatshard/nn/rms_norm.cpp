#include "flatshard/nn/rms_norm.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/ops/cuda_ops.h"
#include "flatshard/ops/rms_norm_rows.h"

#include <utility>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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
    node_state(ctx).adds = delta.defined();
    ctx->set_materialize_grads(false);
    auto [y, sum, rstd] = rms_norm_rows(x, delta, weight, eps);
    y = reshape_result(y, x.sizes());
    if (!wants_sum) {
      ctx->save_for_backward({x, weight, rstd});
      return {y};
    }
    // Without delta this is another tensor over x's memory, because autograd
    // would treat x itself as an identity.
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
      if (node_state(ctx).adds) {
        out[kDelta] = dsum;
      }
      return out;
    }
    // Edges count defined tensors only.
    const bool has_delta = node_state(ctx).adds;
    const bool wants_weight =
        ctx->needs_input_grad(has_delta ? kWeight : kDelta);
    const auto [dx, dw] = rms_norm_rows_backward(
        grads[0],
        dsum,
        x,
        weight,
        rstd,
        /*y=*/nullptr,
        wants_weight);
    out[kX] = dx.view(x.sizes());
    if (has_delta && ctx->needs_input_grad(kDelta)) {
      out[kDelta] = out[kX];
    }
    if (wants_weight) {
      out[kWeight] = deliver_norm_wgrad(saved_context(ctx), weight, dw);
    }
    return out;
  }
};

}  // namespace

at::Tensor rms_norm(
    const at::Tensor& x,
    const at::Tensor& weight,
    double eps,
    const ModuleContextPtr& context) {
  check_norm_input(x, {}, weight);
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
  check_norm_input(x, delta, weight);
  const variable_list out = RmsNormFunction::apply(
      x,
      as_optional(delta),
      weight,
      eps,
      /*wants_sum=*/true,
      context);
  return {out[1], out[0]};
}

RmsNormImpl::RmsNormImpl(std::int64_t dim, RmsNormOptions options)
    : Module("RmsNorm"), dim_(dim), options_(std::move(options)) {
  weight_ = declare_parameter(
      "weight",
      {equal_part_of(options_.ranks, dim, "the columns of a norm").size()},
      options_.adds_one ? InitSpec::zeros() : InitSpec::ones());
}

ParameterParts RmsNormImpl::parts() const {
  if (!options_.ranks) {
    return {};
  }
  return {
      {"weight",
       {.dim = 0, .whole = dim_, .part = part_of(options_.ranks, dim_)}}};
}

// The mean of squares is summed over the ranks. The rest is each rank's own.
at::Tensor RmsNormImpl::norm_of_parts(const at::Tensor& x) const {
  const at::Tensor values = x.to(at::kFloat);
  const at::Tensor mean = sum_over_ranks(
                              options_.ranks,
                              values.square().sum(-1, /*keepdim=*/true)) /
                          static_cast<double>(dim_);
  return (values * (mean + options_.eps).rsqrt() * scale().to(at::kFloat))
      .to(x.scalar_type());
}

at::Tensor RmsNormImpl::scale() const {
  return options_.adds_one ? weight_.to(at::kFloat) + 1 : weight_;
}

ModuleContextPtr RmsNormImpl::scale_context() const {
  return options_.adds_one ? nullptr : context();
}

at::Tensor RmsNormImpl::forward(const at::Tensor& x) {
  if (options_.ranks) {
    return norm_of_parts(x);
  }
  return rms_norm(x, scale(), options_.eps, scale_context());
}

std::tuple<at::Tensor, at::Tensor> RmsNormImpl::forward(
    const at::Tensor& x,
    const at::Tensor& delta) {
  FLATSHARD_CHECK(
      !options_.ranks,
      usage,
      "a norm over columns of several ranks adds nothing to its input");
  return add_rms_norm(x, delta, scale(), options_.eps, scale_context());
}

at::Tensor deliver_norm_wgrad(
    const ModuleContextPtr& context,
    const at::Tensor& weight,
    const at::Tensor& dw) {
  const bool has_partials = cuda::supports(dw) && dw.dim() == 2;
  const auto write = [&](at::Tensor& grad, bool accumulate) {
    if (has_partials) {
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
  return deliver_wgrad(
      context,
      weight,
      compute,
      write,
      /*adds_to_float32=*/has_partials);
}

}  // namespace flatshard::nn
