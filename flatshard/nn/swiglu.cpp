#include "flatshard/nn/swiglu.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/nn/matmul.h"
#include "flatshard/nn/parallel/parallel_products.h"
#include "flatshard/nn/second_run.h"
#include "flatshard/ops/float8/float8_fused.h"
#include "flatshard/ops/float8/known_amax.h"
#include "flatshard/ops/gated_product.h"

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void save_activation(AutogradContext* ctx, GateActivation activation) {
  ctx->saved_data["activation"] = static_cast<std::int64_t>(activation);
}

GateActivation saved_activation(AutogradContext* ctx) {
  return static_cast<GateActivation>(ctx->saved_data["activation"].toInt());
}

struct GatedFunction : torch::autograd::Function<GatedFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& gate,
      const at::Tensor& up,
      GateActivation activation) {
    ctx->save_for_backward({gate, up});
    save_activation(ctx, activation);
    return gated_product(activation, gate, up);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto [dgate, dup] = gated_product_backward(
        saved_activation(ctx),
        grads[0],
        saved[0],
        saved[1]);
    return {dgate, dup, {}};
  }
};

// Returns the gated value as FP8, quantized where it is computed.
MatmulRows float8_product(
    const at::Tensor& gate,
    const at::Tensor& up,
    float8::Recipe recipe,
    const Float8Wanted& wanted) {
  const at::Tensor rows = as_rows(gate);
  return {
      swiglu_float8(
          rows,
          as_rows(up),
          MatmulRows::activations_for(recipe),
          wanted),
      recipe,
      rows};
}

// Returns the recipe for quantizing the gated value where it is computed;
// absent: it is a tensor, and the matmul quantizes it.
// @param weights  none: an adapter reads the gated value in its own dtype.
std::optional<float8::Recipe> product_recipe(
    GateActivation activation,
    at::TensorList weights,
    const ModuleContextPtr& context) {
  const bool is_silu = activation == GateActivation::silu;
  return common_recipe(is_silu ? weights : at::TensorList(), context);
}

// With `ranks` the layer is row-parallel: gate and up have all tokens, the
// result and its gradient have this rank's tokens.
struct GatedLinearFunction : torch::autograd::Function<GatedLinearFunction> {
  enum Input { kGate, kUp, kWeight, kResidual, kFactors };

  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& gate,
      const at::Tensor& up,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& maybe_residual,
      at::TensorList factors,
      GateActivation activation,
      const ModuleContextPtr& context,
      const AdapterCallsPtr& calls,
      const TensorParallelPtr& ranks,
      bool is_unread) {
    save_context(ctx, context);
    save_ranks(ctx, ranks);
    save_activation(ctx, activation);
    const auto recipe = product_recipe(
        activation,
        calls ? at::TensorList() : at::TensorList(weight),
        context);
    const auto make_product = [&] {
      if (is_unread && !calls) {
        return MatmulRows(at::Tensor());
      }
      return recipe ? float8_product(gate, up, *recipe, {.columns = false})
                    : MatmulRows(as_rows(gated_product(activation, gate, up)));
    };
    const MatmulRows product = make_product();
    const AdapterForward adapters(calls, factors, product);
    const at::Tensor residual = maybe_residual.value_or(at::Tensor());
    std::vector<std::int64_t> sizes = with_last(gate, weight.size(0));
    if (ranks) {
      sizes = sizes_of_part(*ranks, sizes);
    }
    variable_list saved{gate, up, weight};
    const auto result = [&] {
      if (is_unread) {
        return without_values(sizes, gate.options());
      }
      const at::Tensor y = adapters.matmul_and_scatter(
          ranks,
          weight,
          context,
          {},
          residual.defined() ? as_rows(residual) : residual);
      return reshape_result(y, sizes);
    }();
    saved.push_back(product.amax());
    adapters.save(ctx, saved);
    ctx->save_for_backward(saved);
    node_state(ctx).adds = residual.defined();
    return result;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list saved = ctx->get_saved_variables();
    AdapterBackward adapters(ctx, saved);
    const at::Tensor &gate = saved[0], &up = saved[1], &weight = saved[2];
    const ModuleContextPtr context = saved_context(ctx);
    const bool has_residual = node_state(ctx).adds;
    const bool wants_pair =
        ctx->needs_input_grad(kGate) || ctx->needs_input_grad(kUp);
    at::Tensor d;
    const at::Tensor dy = gathered_gradient(
        saved_ranks(ctx),
        grads[0],
        weight,
        context,
        wants_pair && !adapters ? &d : nullptr);
    variable_list out(kFactors + adapters.num_factors() + 5);
    // Edges count defined tensors only.
    adapters.set_places(
        {.edge = kResidual + (has_residual ? 1U : 0U), .out = kFactors});
    adapters.begin(dy, out);
    const MatmulRows g =
        gradient_rows(dy, wants_pair && ctx->needs_input_grad(kWeight));
    const GateActivation activation = saved_activation(ctx);
    const auto recipe = product_recipe(
        activation,
        adapters ? at::TensorList() : at::TensorList(weight),
        context);
    at::Tensor product;
    if (wants_pair) {
      if (!d.defined()) {
        // First: this is the widest gradient, and a sum reads it once more.
        adapters.add_input_gradient(d);
        add_input_gradient(d, g, weight, context);
      }
      d = d.view(gate.sizes());
      if (recipe && float8::traits_of(*recipe).has_one_scale()) {
        at::Tensor amax;
        std::tie(out[kGate], out[kUp], amax) =
            swiglu_backward_amax(d, gate, up, /*gives_up_dy=*/true);
        note_amax(out[kGate], amax[0]);
        note_amax(out[kUp], amax[1]);
      } else {
        std::tie(out[kGate], out[kUp]) = gated_product_backward(
            activation,
            d,
            gate,
            up,
            recipe ? nullptr : &product);
      }
    }
    const bool wants_weight = ctx->needs_input_grad(kWeight);
    if (!recipe && !product.defined() &&
        (wants_weight || adapters.wants_input(0))) {
      product = gated_product(activation, gate, up);
    }
    adapters.end(product, out);
    if (wants_weight) {
      out[kWeight] = deliver_matmul_wgrad(
          context,
          weight,
          g,
          recipe ? float8_product(
                       gate,
                       up,
                       *recipe,
                       {.rows = false,
                        .multiple = MatmulRows::multiple_for(*recipe),
                        .amax = saved[3]})
                 : activation_rows(as_rows(product), saved[3]));
    }
    if (has_residual && ctx->needs_input_grad(kResidual)) {
      out[kResidual] = grads[0];
    }
    return out;
  }
};

void check_pair(const at::Tensor& gate, const at::Tensor& up) {
  FLATSHARD_CHECK(
      gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(),
      usage,
      "swiglu: expected gate and up of one shape and dtype, got {} and {}",
      c10::str(gate.sizes()),
      c10::str(up.sizes()));
}

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return gated(GateActivation::silu, gate, up);
}

at::Tensor
gated(GateActivation activation, const at::Tensor& gate, const at::Tensor& up) {
  check_pair(gate, up);
  return GatedFunction::apply(gate, up, activation);
}

std::tuple<at::Tensor, at::Tensor> gated_gradients(
    GateActivation activation,
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up) {
  check_pair(gate, up);
  const at::NoGradGuard no_grad;
  return gated_product_backward(activation, dy, gate, up);
}

at::Tensor gated_linear(
    GateActivation activation,
    const at::Tensor& gate,
    const at::Tensor& up,
    LinearImpl& layer,
    const at::Tensor& residual,
    bool is_unread) {
  check_pair(gate, up);
  const bool is_plain =
      is_unread ? !layer.is_followed() : layer.has_only_pre_hooks();
  if (!is_plain || layer.bias().defined()) {
    return call_with_hooks(layer, gated(activation, gate, up), residual);
  }
  layer.run_forward_pre_hooks(collect_tensors(gate, up, residual));
  const TensorParallelPtr& ranks = layer.sums_over();
  // The sum over the ranks does not include it.
  const bool adds_later = ranks && residual.defined() && !is_unread;
  const at::Tensor y = GatedLinearFunction::apply(
      gate,
      up,
      layer.weight(),
      adds_later ? std::nullopt : as_optional(residual),
      at::TensorList(adapter_factors({layer.adapter()})),
      activation,
      layer.context(),
      AdapterCalls::of({layer.adapter()}),
      ranks,
      is_unread);
  return adds_later ? y + residual : y;
}

}  // namespace flatshard::nn
