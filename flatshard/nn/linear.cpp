#include "flatshard/nn/linear.h"

#include "flatshard/nn/autograd.h"

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  enum Input { kX, kWeight, kBias, kResidual };

  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& maybe_bias,
      const std::optional<at::Tensor>& maybe_residual,
      const ModuleContextPtr& context) {
    const at::Tensor bias = maybe_bias.value_or(at::Tensor());
    const at::Tensor residual = maybe_residual.value_or(at::Tensor());
    save_context(ctx, context);
    ctx->save_for_backward({x, weight, bias});
    ctx->saved_data["residual"] = residual.defined();
    const at::Tensor rows = as_rows(x);
    const at::Tensor wt = weight.t();
    at::Tensor y;
    if (residual.defined()) {
      y = at::addmm(as_rows(residual), rows, wt);
      if (bias.defined()) {
        y.add_(bias);
      }
    } else {
      y = bias.defined() ? at::addmm(bias, rows, wt) : at::mm(rows, wt);
    }
    std::vector<std::int64_t> sizes = x.sizes().vec();
    sizes.back() = weight.size(0);
    return reshape_result(y, sizes);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2];
    const ModuleContextPtr context = saved_context(ctx);
    const at::Tensor g = as_rows(grads[0]);
    variable_list out(5);
    // Edges count defined tensors only.
    const std::size_t residual_edge = kBias + (bias.defined() ? 1 : 0);
    const bool has_residual = ctx->saved_data["residual"].toBool();
    if (ctx->needs_input_grad(kX)) {
      out[kX] = at::mm(g, weight).view(x.sizes());
    }
    if (ctx->needs_input_grad(kWeight)) {
      const at::Tensor rows = as_rows(x);
      const auto compute = [&] { return at::mm(g.t(), rows); };
      out[kWeight] = deliver_wgrad(
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
    if (bias.defined() && ctx->needs_input_grad(kBias)) {
      out[kBias] = deliver_wgrad(context, bias, [&] { return g.sum(0); });
    }
    if (has_residual && ctx->needs_input_grad(residual_edge)) {
      out[kResidual] = grads[0];
    }
    return out;
  }
};

}  // namespace

at::Tensor linear(
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& bias,
    const at::Tensor& residual,
    const ModuleContextPtr& context) {
  FLATSHARD_CHECK(
      x.dim() >= 1 && x.size(-1) == weight.size(1),
      usage,
      "linear: expected x of [..., {}], got {}",
      weight.size(1),
      c10::str(x.sizes()));
  // Undefined tensors go as empty optionals: a Function refuses them otherwise.
  return LinearFunction::apply(
      x,
      weight,
      as_optional(bias),
      as_optional(residual),
      context);
}

LinearImpl::LinearImpl(
    std::int64_t in_features,
    std::int64_t out_features,
    LinearOptions options)
    : Module("Linear") {
  weight_ =
      declare_parameter("weight", {out_features, in_features}, options.init);
  if (options.bias) {
    bias_ = declare_parameter("bias", {out_features}, InitSpec::zeros());
  }
}

at::Tensor LinearImpl::forward(
    const at::Tensor& x,
    const at::Tensor& residual) {
  return linear(x, weight_, bias_, residual, context());
}

}  // namespace flatshard::nn
