#include "flatshard/nn/norm_linears.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/nn/matmul.h"
#include "flatshard/nn/rms_norm_rows.h"

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Results: the sum, then one of each weight.
struct NormLinearsFunction : torch::autograd::Function<NormLinearsFunction> {
  static variable_list forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      const std::optional<at::Tensor>& maybe_delta,
      const at::Tensor& norm_weight,
      at::TensorList weights,
      double eps,
      const std::vector<ModuleContextPtr>& contexts) {
    const at::Tensor delta = maybe_delta.value_or(at::Tensor());
    ctx->saved_data["delta"] = delta.defined();
    ctx->saved_data["eps"] = eps;
    ctx->set_materialize_grads(false);
    auto [rows, sum, rstd] = rms_norm_rows(x, delta, norm_weight, eps);
    // Without delta another tensor over x's memory: autograd would take x
    // itself for an identity.
    sum = reshape_result(sum.defined() ? sum : x, x.sizes());
    variable_list saved{sum, rstd, norm_weight};
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(saved);
    variable_list results{sum};
    const MatmulRows normed(rows);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      // The norm's context is the first.
      results.push_back(reshape_result(
          matmul_forward(normed, weights[i], contexts[1 + i]),
          with_last(x, weights[i].size(0))));
    }
    for (std::size_t i = 0; i < contexts.size(); ++i) {
      save_context(ctx, contexts[i], i);
    }
    return results;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("RMSNorm");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &sum = saved[0], &rstd = saved[1], &norm_weight = saved[2];
    const auto weight = [&](std::size_t i) { return saved[2 + i]; };
    // Edges count defined tensors only.
    const std::size_t norm_edge = ctx->saved_data["delta"].toBool() ? 2 : 1;
    const bool wants_dx = ctx->needs_input_grad(0) ||
                          (norm_edge == 2 && ctx->needs_input_grad(1));
    const bool wants_norm = ctx->needs_input_grad(norm_edge);
    const std::size_t num_weights = grads.size() - 1;
    const auto wants_weight = [&](std::size_t i) {
      return grads[i].defined() && ctx->needs_input_grad(norm_edge + i);
    };

    // Of what the layers read, then of the norm's input.
    at::Tensor dy;
    bool wants_weights = false;
    std::vector<std::optional<MatmulRows>> g(grads.size());
    for (std::size_t i = 1; i <= num_weights; ++i) {
      wants_weights |= wants_weight(i);
      if (grads[i].defined()) {
        g[i].emplace(gradient_rows(
            as_rows(grads[i]),
            (wants_dx || wants_norm) && wants_weight(i)));
        if (wants_dx || wants_norm) {
          add_input_gradient(dy, *g[i], weight(i), saved_context(ctx, i));
        }
      }
    }
    at::Tensor dx = grads[0];
    at::Tensor dw;
    at::Tensor normed;
    if (dy.defined()) {
      std::tie(dx, dw) = rms_norm_rows_backward(
          dy,
          grads[0],
          sum,
          norm_weight,
          rstd,
          wants_weights ? &normed : nullptr);
      dx = dx.view(sum.sizes());
    } else if (wants_weights) {
      normed = std::get<0>(rms_norm_rows(
          sum,
          {},
          norm_weight,
          ctx->saved_data["eps"].toDouble()));
    }

    variable_list out(3 + num_weights + 2);
    out[0] = dx;
    if (norm_edge == 2) {
      out[1] = dx;
    }
    if (wants_norm && dw.defined()) {
      out[2] = deliver_norm_wgrad(saved_context(ctx), norm_weight, dw);
    }
    const MatmulRows rows(normed);
    for (std::size_t i = 1; i <= num_weights; ++i) {
      if (wants_weight(i)) {
        out[2 + i] =
            deliver_matmul_wgrad(saved_context(ctx, i), weight(i), *g[i], rows);
      }
    }
    return out;
  }
};

}  // namespace

NormLinears norm_linears(
    const at::Tensor& x,
    const at::Tensor& delta,
    RmsNormImpl& norm,
    const std::vector<LinearImpl*>& layers) {
  if (!norm.has_only_pre_hooks() || !can_run_together(layers)) {
    const auto [sum, normed] = call_with_hooks(norm, x, delta);
    return {sum, linears(normed, layers)};
  }
  check_norm_input(x, delta, norm.weight());
  norm.run_forward_pre_hooks(collect_tensors(x, delta));
  JointLinears joint = begin_together(x, layers);
  joint.contexts.insert(joint.contexts.begin(), norm.context());
  variable_list results = NormLinearsFunction::apply(
      x,
      as_optional(delta),
      norm.weight(),
      at::TensorList(joint.weights),
      norm.eps(),
      joint.contexts);
  NormLinears done{results.front(), {}};
  done.outs.assign(results.begin() + 1, results.end());
  return done;
}

}  // namespace flatshard::nn
