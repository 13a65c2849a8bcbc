#include "flatshard/moe/grouped_linear.h"

#include "flatshard/moe/cuda_moe.h"
#include "flatshard/moe/grouped_matmul.h"
#include "flatshard/nn/autograd.h"
#include "flatshard/nn/cuda_ops.h"
#include "flatshard/nn/parameter_check.h"
#include "flatshard/nn/swiglu.h"

#include <ATen/ATen.h>

#include <optional>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor deliver_grouped_wgrad(
    const ModuleContextPtr& context,
    const at::Tensor& weight,
    const at::Tensor& g,
    const at::Tensor& x,
    const Groups& groups) {
  if (defer_wgrad(context, weight, [&]() -> LateWgrad {
        return [g, x, groups](at::Tensor& grad, bool accumulate) {
          grouped_weight_gradient(grad, accumulate, g, x, groups);
        };
      })) {
    return {};
  }
  return deliver_wgrad(
      context,
      weight,
      [&] {
        at::Tensor grad = at::empty(weight.sizes(), g.options());
        grouped_weight_gradient(grad, false, g, x, groups);
        return grad;
      },
      [&](at::Tensor& grad, bool accumulate) {
        grouped_weight_gradient(grad, accumulate, g, x, groups);
      });
}

// x[order], or x itself where `order` is undefined.
at::Tensor rows_of(
    const at::Tensor& x,
    const at::Tensor& order,
    const at::Tensor& inverse) {
  return order.defined() ? permute_rows(x, {order, inverse}) : x.contiguous();
}

struct GroupedLinearFunction
    : torch::autograd::Function<GroupedLinearFunction> {
  enum Input { kX, kWeight };

  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      const at::Tensor& weight,
      const at::Tensor& ends,
      const std::optional<at::Tensor>& ordered_by,
      const std::optional<at::Tensor>& inverted_by,
      std::int64_t per_expert,
      const ModuleContextPtr& context) {
    save_context(ctx, context);
    ctx->saved_data["per_expert"] = per_expert;
    const at::Tensor order = ordered_by.value_or(at::Tensor());
    const at::Tensor inverse = inverted_by.value_or(at::Tensor());
    const at::Tensor rows = rows_of(x, order, inverse);
    ctx->save_for_backward(
        {order.defined() ? x : rows, weight, ends, order, inverse});
    return grouped_forward(rows, weight, {ends, per_expert});
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("grouped_linear");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const at::Tensor &order = saved[3], &inverse = saved[4];
    const Groups groups{saved[2], ctx->saved_data["per_expert"].toInt()};
    const at::Tensor g = grads[0].contiguous();
    variable_list out(7);
    if (ctx->needs_input_grad(kX)) {
      out[kX] = grouped_input_gradient(g, weight, groups);
      if (order.defined()) {
        out[kX] = sum_rows_of_tokens(out[kX], {order, inverse});
      }
    }
    if (ctx->needs_input_grad(kWeight)) {
      out[kWeight] = deliver_grouped_wgrad(
          saved_context(ctx),
          weight,
          g,
          rows_of(x, order, inverse),
          groups);
    }
    return out;
  }
};

// Gate and up of each row, in float32.
std::vector<at::Tensor> wide_halves(const at::Tensor& gate_up) {
  return gate_up.to(at::kFloat).chunk(2, /*dim=*/1);
}

at::Tensor weighted_swiglu(
    const at::Tensor& gate_up,
    const at::Tensor& row_weights) {
  if (cuda::supports(gate_up)) {
    at::Tensor y =
        at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
    cuda::weighted_swiglu_forward(gate_up, row_weights, y);
    return y;
  }
  const auto halves = wide_halves(gate_up);
  return (at::silu(halves[0]) * halves[1] * row_weights.unsqueeze(1))
      .to(gate_up.scalar_type());
}

struct SwigluGradients {
  at::Tensor gate_up;
  at::Tensor row_weights;
  at::Tensor product;
};

// `dy` may be overwritten.
SwigluGradients weighted_swiglu_backward(
    const at::Tensor& dy,
    const at::Tensor& gate_up,
    const at::Tensor& row_weights) {
  SwigluGradients d;
  if (cuda::supports(gate_up)) {
    d.gate_up = at::empty_like(gate_up);
    d.row_weights = at::empty_like(row_weights);
    d.product = dy;
    cuda::weighted_swiglu_backward(
        dy,
        gate_up,
        row_weights,
        d.gate_up,
        d.row_weights,
        d.product);
    return d;
  }
  const auto halves = wide_halves(gate_up);
  const at::Tensor weights = row_weights.unsqueeze(1);
  const at::Tensor g = dy.to(at::kFloat);
  const at::Tensor product = at::silu(halves[0]) * halves[1];
  const auto [gate, up] = swiglu_gradients(g * weights, halves[0], halves[1]);
  d.row_weights = (g * product).sum(1);
  d.product = (product * weights).to(gate_up.scalar_type());
  d.gate_up = at::cat({gate, up}, 1).to(gate_up.scalar_type());
  return d;
}

struct GroupedSwigluLinearFunction
    : torch::autograd::Function<GroupedSwigluLinearFunction> {
  enum Input { kGateUp, kRowWeights, kWeight };

  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& gate_up,
      const at::Tensor& row_weights,
      const at::Tensor& weight,
      const at::Tensor& ends,
      std::int64_t per_expert,
      const ModuleContextPtr& context) {
    save_context(ctx, context);
    ctx->saved_data["per_expert"] = per_expert;
    const at::Tensor rows = gate_up.contiguous();
    ctx->save_for_backward({rows, row_weights, weight, ends});
    return grouped_forward(
        weighted_swiglu(rows, row_weights),
        weight,
        {ends, per_expert});
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("grouped_swiglu_linear");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &gate_up = saved[0], &row_weights = saved[1],
                     &weight = saved[2];
    const Groups groups{saved[3], ctx->saved_data["per_expert"].toInt()};
    const at::Tensor g = grads[0].contiguous();
    variable_list out(6);
    at::Tensor product;
    if (ctx->needs_input_grad(kGateUp) || ctx->needs_input_grad(kRowWeights)) {
      SwigluGradients d = weighted_swiglu_backward(
          grouped_input_gradient(g, weight, groups),
          gate_up,
          row_weights);
      out[kGateUp] = d.gate_up;
      out[kRowWeights] = d.row_weights;
      product = d.product;
    }
    if (ctx->needs_input_grad(kWeight)) {
      if (!product.defined()) {
        product = weighted_swiglu(gate_up, row_weights);
      }
      out[kWeight] =
          deliver_grouped_wgrad(saved_context(ctx), weight, g, product, groups);
    }
    return out;
  }
};

void check_grouped(
    const at::Tensor& x,
    std::int64_t columns,
    const at::Tensor& weight,
    const Groups& groups) {
  FLATSHARD_CHECK(
      weight.dim() == 3 && x.dim() == 2 && x.size(1) == columns,
      usage,
      "grouped_linear: expected rows [rows, {}] for a weight [experts, out, "
      "in] of {}, got {}",
      columns,
      c10::str(weight.sizes()),
      c10::str(x.sizes()));
  FLATSHARD_CHECK(
      groups.ends.dim() == 1 && groups.ends.scalar_type() == at::kInt &&
          groups.ends.size(0) == weight.size(0) * groups.per_expert,
      usage,
      "grouped_linear: expected int32 ends of {} experts * {} groups, got {} "
      "{}",
      weight.size(0),
      groups.per_expert,
      c10::toString(groups.ends.scalar_type()),
      c10::str(groups.ends.sizes()));
  check_has_memory("grouped_linear", x, weight);
  check_same_dtype("grouped_linear", x, weight);
}

}  // namespace

at::Tensor grouped_linear(
    const at::Tensor& x,
    const at::Tensor& weight,
    const Groups& groups,
    const ModuleContextPtr& context) {
  check_grouped(x, weight.size(-1), weight, groups);
  return GroupedLinearFunction::apply(
      x,
      weight,
      groups.ends,
      std::optional<at::Tensor>(),
      std::optional<at::Tensor>(),
      groups.per_expert,
      context);
}

at::Tensor permute_grouped_linear(
    const at::Tensor& x,
    const Permutation& permutation,
    const at::Tensor& weight,
    const Groups& groups,
    const ModuleContextPtr& context) {
  check_grouped(x, weight.size(-1), weight, groups);
  FLATSHARD_CHECK(
      x.size(0) == permutation.tokens(),
      usage,
      "permute_grouped_linear: expected x of [{}, {}], got {}",
      permutation.tokens(),
      weight.size(-1),
      c10::str(x.sizes()));
  return GroupedLinearFunction::apply(
      x,
      weight,
      groups.ends,
      std::optional(permutation.order),
      std::optional(permutation.inverse),
      groups.per_expert,
      context);
}

at::Tensor grouped_swiglu_linear(
    const at::Tensor& gate_up,
    const at::Tensor& row_weights,
    const at::Tensor& weight,
    const Groups& groups,
    const ModuleContextPtr& context) {
  check_grouped(gate_up, 2 * weight.size(-1), weight, groups);
  FLATSHARD_CHECK(
      row_weights.dim() == 1 && row_weights.size(0) == gate_up.size(0) &&
          row_weights.scalar_type() == at::kFloat,
      usage,
      "grouped_swiglu_linear: expected float32 weights of {} rows, got {} {}",
      gate_up.size(0),
      c10::toString(row_weights.scalar_type()),
      c10::str(row_weights.sizes()));
  return GroupedSwigluLinearFunction::apply(
      gate_up,
      row_weights,
      weight,
      groups.ends,
      groups.per_expert,
      context);
}

}  // namespace flatshard::nn
