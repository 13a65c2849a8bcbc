#include "flatshard/nn/norm_linears.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/nn/matmul.h"
#include "flatshard/ops/float8/float8_fused.h"
#include "flatshard/ops/float8/known_amax.h"
#include "flatshard/ops/rms_norm_rows.h"

#include <utility>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Returns the common recipe of the layers; unset without weights. contexts[0]
// belongs to the norm.
std::optional<float8::Recipe> recipe_of(
    at::TensorList weights,
    const std::vector<ModuleContextPtr>& contexts) {
  return common_recipe(
      weights,
      at::ArrayRef<ModuleContextPtr>(contexts).slice(1));
}

struct NormRows {
  MatmulRows normed;
  at::Tensor sum;  // undefined without delta
  at::Tensor rstd;
};

// If all layers multiply in FP8, their input is computed as FP8.
NormRows norm_rows(
    const at::Tensor& x,
    const at::Tensor& delta,
    const at::Tensor& norm_weight,
    double eps,
    std::optional<float8::Recipe> recipe) {
  if (!recipe) {
    auto [rows, sum, rstd] = rms_norm_rows(x, delta, norm_weight, eps);
    return {MatmulRows(std::move(rows)), std::move(sum), std::move(rstd)};
  }
  const at::Tensor rows = as_rows(x);
  NormFloat8 made = rms_norm_float8(
      rows,
      delta.defined() ? as_rows(delta) : delta,
      norm_weight,
      eps,
      MatmulRows::activations_for(*recipe),
      {.columns = false});
  return {
      MatmulRows(std::move(made.planes), *recipe, rows),
      delta.defined() ? std::move(made.sum) : at::Tensor(),
      std::move(made.rstd)};
}

// Results: the sum, then one of each weight.
struct NormLinearsFunction : torch::autograd::Function<NormLinearsFunction> {
  static variable_list forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      const std::optional<at::Tensor>& maybe_delta,
      const at::Tensor& norm_weight,
      at::TensorList weights,
      at::TensorList biases,
      at::TensorList factors,
      double eps,
      const std::vector<ModuleContextPtr>& contexts,
      const AdapterCallsPtr& calls) {
    const at::Tensor delta = maybe_delta.value_or(at::Tensor());
    NodeState& state = node_state(ctx);
    state.contexts = contexts;
    state.adds = delta.defined();
    state.eps = eps;
    ctx->set_materialize_grads(false);
    // Adapters read it in its own dtype.
    const auto recipe = recipe_of(calls ? at::TensorList() : weights, contexts);
    auto [normed, sum, rstd] = norm_rows(x, delta, norm_weight, eps, recipe);
    const AdapterForward adapters(calls, factors, normed);
    // Without delta the result is another tensor over x's memory. Autograd
    // would take x itself for an identity.
    sum = reshape_result(sum.defined() ? sum : x, x.sizes());
    variable_list results{sum};
    for (std::size_t i = 0; i < weights.size(); ++i) {
      // The norm's context is the first.
      const at::Tensor y = adapters.matmul(
          i,
          weights[i],
          contexts[1 + i],
          biases.empty() ? at::Tensor() : biases[i]);
      results.push_back(reshape_result(y, with_last(x, weights[i].size(0))));
    }
    variable_list saved{sum, rstd, norm_weight, normed.amax()};
    saved.insert(saved.end(), weights.begin(), weights.end());
    saved.insert(saved.end(), biases.begin(), biases.end());
    adapters.save(ctx, saved);
    ctx->save_for_backward(saved);
    return results;
  }

  // `grads` is a reference. A gradient is freed once it is quantized.
  static variable_list backward(AutogradContext* ctx, variable_list& grads) {
    refuse_create_graph("RMSNorm");
    variable_list saved = ctx->get_saved_variables();
    AdapterBackward adapters(ctx, saved);
    const at::Tensor &sum = saved[0], &rstd = saved[1], &norm_weight = saved[2];
    const at::Tensor& amax = saved[3];
    const auto weight = [&](std::size_t i) { return saved[3 + i]; };
    // Edges count defined tensors only.
    const NodeState& state = node_state(ctx);
    const std::size_t norm_edge = state.adds ? 2 : 1;
    const bool wants_dx = ctx->needs_input_grad(0) ||
                          (norm_edge == 2 && ctx->needs_input_grad(1));
    const bool wants_norm = ctx->needs_input_grad(norm_edge);
    const std::size_t num_weights = grads.size() - 1;
    const bool has_biases = saved.size() > 4 + num_weights;
    const std::size_t num_biases = has_biases ? num_weights : 0;
    const std::size_t first_factor = 3 + num_weights + num_biases;
    adapters.set_places(
        {.edge = norm_edge + num_weights + num_biases + 1,
         .out = first_factor});
    variable_list out(first_factor + adapters.num_factors() + 3);
    const std::vector<ModuleContextPtr>& contexts = state.contexts;

    adapters.begin(at::TensorList(grads).slice(1), out);
    // The gradient of the layers' input, then of the norm's input.
    at::Tensor dy;
    bool wants_weights = false;
    std::vector<std::optional<MatmulRows>> g(grads.size());
    const auto wants_weight = [&](std::size_t i) {
      return g[i].has_value() && ctx->needs_input_grad(norm_edge + i);
    };
    for (std::size_t i = 1; i <= num_weights; ++i) {
      if (grads[i].defined()) {
        const bool wants = ctx->needs_input_grad(norm_edge + i);
        wants_weights |= wants || adapters.wants_input(i - 1);
        // Before the gradient is freed.
        if (has_biases && ctx->needs_input_grad(norm_edge + num_weights + i)) {
          out[2 + num_weights + i] = deliver_bias_grad(
              contexts[i],
              saved[3 + num_weights + i],
              as_rows(grads[i]));
        }
        g[i].emplace(gradient_rows(
            as_rows(std::exchange(grads[i], {})),
            (wants_dx || wants_norm) && wants));
        if (wants_dx || wants_norm) {
          add_input_gradient(dy, *g[i], weight(i), contexts[i]);
        }
      }
    }
    if (dy.defined()) {
      adapters.add_input_gradient(dy);
    }
    const auto recipe = recipe_of(
        adapters ? at::TensorList()
                 : at::TensorList(saved).slice(4, num_weights),
        contexts);
    at::Tensor dx = grads[0];
    at::Tensor dw;
    at::Tensor normed;
    if (dy.defined() && recipe && float8::traits_of(*recipe).has_one_scale()) {
      at::Tensor amax_of_dx;
      std::tie(dx, dw, amax_of_dx) = rms_norm_backward_amax(
          dy,
          grads[0].defined() ? as_rows(grads[0]) : grads[0],
          as_rows(sum),
          norm_weight,
          rstd);
      note_amax(dx, std::move(amax_of_dx));
    } else if (dy.defined()) {
      std::tie(dx, dw) = rms_norm_rows_backward(
          dy,
          grads[0],
          sum,
          norm_weight,
          rstd,
          wants_weights && !recipe ? &normed : nullptr,
          wants_norm);
    } else if (wants_weights && !recipe) {
      normed = std::get<0>(rms_norm_rows(sum, {}, norm_weight, state.eps));
    }
    if (dy.defined()) {
      dx = dx.view(sum.sizes());
    }

    out[0] = dx;
    if (norm_edge == 2) {
      out[1] = dx;
    }
    if (wants_norm && dw.defined()) {
      out[2] = deliver_norm_wgrad(contexts[0], norm_weight, dw);
    }
    const MatmulRows rows =
        wants_weights && recipe
            ? MatmulRows(
                  rms_norm_float8_again(
                      as_rows(sum),
                      rstd,
                      norm_weight,
                      MatmulRows::activations_for(*recipe),
                      {.rows = false,
                       .multiple = MatmulRows::multiple_for(*recipe),
                       .amax = amax}),
                  *recipe,
                  as_rows(sum))
            : MatmulRows(normed);
    for (std::size_t i = 1; i <= num_weights; ++i) {
      if (wants_weight(i)) {
        out[2 + i] = deliver_matmul_wgrad(contexts[i], weight(i), *g[i], rows);
      }
    }
    adapters.end(normed, out);
    return out;
  }
};

}  // namespace

NormLinears norm_linears(
    const at::Tensor& x,
    const at::Tensor& delta,
    RmsNormImpl& norm,
    const std::vector<LinearImpl*>& layers) {
  // A rank's norm and its layers read different tokens.
  const bool gathers = layers.front()->gathers_from() != nullptr;
  if (!norm.has_only_pre_hooks() || gathers || !can_run_together(layers)) {
    const auto [sum, normed] = call_with_hooks(norm, x, delta);
    return {sum, linears(normed, layers)};
  }
  const at::Tensor scale = norm.scale();
  check_norm_input(x, delta, scale);
  norm.run_forward_pre_hooks(collect_tensors(x, delta));
  JointLinears joint = begin_together(x, layers);
  joint.contexts.insert(joint.contexts.begin(), norm.scale_context());
  variable_list results = NormLinearsFunction::apply(
      x,
      as_optional(delta),
      scale,
      at::TensorList(joint.weights),
      at::TensorList(joint.biases),
      at::TensorList(joint.factors),
      norm.eps(),
      joint.contexts,
      joint.adapters);
  NormLinears done{results.front(), {}};
  done.outs.assign(results.begin() + 1, results.end());
  return done;
}

}  // namespace flatshard::nn
