#include "flatshard/moe/grouped_linear.h"

#include "flatshard/moe/expert_biases.h"
#include "flatshard/moe/grouped_matmul.h"
#include "flatshard/moe/weighted_gate.h"
#include "flatshard/nn/autograd.h"
#include "flatshard/nn/second_run.h"
#include "flatshard/ops/parameter_check.h"

#include <ATen/ATen.h>

#include <optional>
#include <tuple>
#include <utility>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Delivers grad[e] = g_e^T x_e.
at::Tensor deliver_grouped_wgrad(
    const ModuleContextPtr& context,
    const at::Tensor& weight,
    const at::Tensor& g,
    const at::Tensor& x,
    const Groups& groups) {
  if (defer_wgrad(context, weight, [&]() -> LateWgrad {
        return {
            [g, x, groups](at::Tensor& grad, bool accumulate) {
              grouped_weight_gradient(grad, accumulate, g, x, groups);
            },
            adds_to_float32(weight, g, x, groups)};
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
      },
      adds_to_float32(weight, g, x, groups));
}

// x[order], or x itself where `order` is undefined.
at::Tensor rows_of(
    const at::Tensor& x,
    const at::Tensor& order,
    const at::Tensor& inverse) {
  return order.defined() ? permute_rows(x, {order, inverse}) : x.contiguous();
}

// A layer and the groups of its rows, in a node.
struct LayerCall {
  GroupedLayer layer;
  Groups groups;

  // Saves `tensors` and the call.
  void save(
      AutogradContext* ctx,
      variable_list tensors,
      const ModuleContextPtr& context) const {
    tensors.insert(tensors.end(), {layer.weight, layer.bias, groups.ends});
    ctx->save_for_backward(std::move(tensors));
    ctx->saved_data["layout"] = static_cast<std::int64_t>(layer.layout);
    ctx->saved_data["per_expert"] = groups.per_expert;
    save_context(ctx, context);
  }
  // @param saved  the context's variables
  static LayerCall of(AutogradContext* ctx, const variable_list& saved) {
    const at::Tensor* const own = saved.data() + saved.size() - 3;
    const auto layout =
        static_cast<ExpertLayout>(ctx->saved_data["layout"].toInt());
    return {
        {own[0], own[1], layout},
        {own[2], ctx->saved_data["per_expert"].toInt()}};
  }

  at::Tensor forward(const at::Tensor& x) const {
    return layer.is_in_out() ? grouped_input_gradient(x, layer.weight, groups)
                             : grouped_forward(x, layer.weight, groups);
  }
  at::Tensor input_gradient(const at::Tensor& g) const {
    return layer.is_in_out() ? grouped_forward(g, layer.weight, groups)
                             : grouped_input_gradient(g, layer.weight, groups);
  }
  // Sets out[at] to the weight gradient and out[at + 1] to the bias gradient,
  // unless a gradient sink receives them.
  // @param x        () -> the rows that were multiplied
  // @param factors  of each row, by which its bias was multiplied; undefined: 1
  template <class X>
  void deliver_gradients(
      AutogradContext* ctx,
      variable_list& out,
      std::size_t at,
      const at::Tensor& g,
      X&& x,
      const at::Tensor& factors = {}) const {
    const ModuleContextPtr context = saved_context(ctx);
    if (ctx->needs_input_grad(at)) {
      at::Tensor left = g;
      at::Tensor right = x();
      if (layer.is_in_out()) {
        std::swap(left, right);
      }
      out[at] =
          deliver_grouped_wgrad(context, layer.weight, left, right, groups);
    }
    if (layer.bias.defined() && ctx->needs_input_grad(at + 1)) {
      out[at + 1] = deliver_bias_sums(
          context,
          layer.bias,
          g,
          factors.defined() ? factors : at::ones({g.size(0)}, g.options()),
          groups);
    }
  }
};

struct GroupedLinearFunction
    : torch::autograd::Function<GroupedLinearFunction> {
  enum Input { kX, kWeight, kBias };

  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      const at::Tensor& /*weight*/,
      const std::optional<at::Tensor>& /*bias*/,
      const LayerCall& call,
      const Permutation& permutation,
      const ModuleContextPtr& context) {
    const auto& [order, inverse, drops] = permutation;
    const at::Tensor rows = rows_of(x, order, inverse);
    call.save(ctx, {order.defined() ? x : rows, order, inverse}, context);
    const at::Tensor y = call.forward(rows);
    if (call.layer.bias.defined()) {
      add_expert_biases(y, call.layer.bias, /*factors=*/{}, call.groups);
    }
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("grouped_linear");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &order = saved[1], &inverse = saved[2];
    const LayerCall call = LayerCall::of(ctx, saved);
    const at::Tensor g = grads[0].contiguous();
    variable_list out(6);
    if (ctx->needs_input_grad(kX)) {
      out[kX] = call.input_gradient(g);
      if (order.defined()) {
        out[kX] = sum_rows_of_tokens(out[kX], {order, inverse});
      }
    }
    call.deliver_gradients(ctx, out, kWeight, g, [&] {
      return rows_of(x, order, inverse);
    });
    return out;
  }
};

struct GroupedGatedLinearFunction
    : torch::autograd::Function<GroupedGatedLinearFunction> {
  enum Input { kGateUp, kRowWeights, kWeight, kBias };

  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& gate_up,
      const at::Tensor& row_weights,
      const at::Tensor& /*weight*/,
      const std::optional<at::Tensor>& /*bias*/,
      const LayerCall& call,
      GateActivation activation,
      const ModuleContextPtr& context,
      bool is_unread) {
    ctx->saved_data["activation"] = static_cast<std::int64_t>(activation);
    const at::Tensor rows = gate_up.contiguous();
    call.save(ctx, {rows, row_weights}, context);
    if (is_unread) {
      return without_values(
          {rows.size(0), call.layer.out_features()},
          rows.options());
    }
    const Gate gate{activation, /*in_turn=*/call.layer.is_in_out()};
    const at::Tensor y = call.forward(weighted_gate(gate, rows, row_weights));
    if (call.layer.bias.defined()) {
      add_expert_biases(y, call.layer.bias, row_weights, call.groups);
    }
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("grouped_gated_linear");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &gate_up = saved[0], &row_weights = saved[1];
    const LayerCall call = LayerCall::of(ctx, saved);
    const Gate gate{
        static_cast<GateActivation>(ctx->saved_data["activation"].toInt()),
        /*in_turn=*/call.layer.is_in_out()};
    const at::Tensor g = grads[0].contiguous();
    variable_list out(8);
    at::Tensor product;
    if (ctx->needs_input_grad(kGateUp) || ctx->needs_input_grad(kRowWeights)) {
      std::tie(out[kGateUp], out[kRowWeights], product) =
          weighted_gate_backward(
              gate,
              call.input_gradient(g),
              gate_up,
              row_weights);
      if (call.layer.bias.defined()) {
        add_expert_bias_dots(out[kRowWeights], call.layer.bias, g, call.groups);
      }
    }
    const auto multiplied = [&] {
      return product.defined() ? product
                               : weighted_gate(gate, gate_up, row_weights);
    };
    call.deliver_gradients(ctx, out, kWeight, g, multiplied, row_weights);
    return out;
  }
};

void check_grouped(
    const at::Tensor& x,
    std::int64_t parts,
    const GroupedLayer& layer,
    const Groups& groups) {
  const at::Tensor& weight = layer.weight;
  FLATSHARD_CHECK(
      weight.dim() == 3 && x.dim() == 2 &&
          x.size(1) == parts * layer.in_features(),
      usage,
      "grouped_linear: expected rows [rows, {}] for a weight [experts, {}] of "
      "{}, got {}",
      weight.dim() == 3 ? parts * layer.in_features() : 0,
      layer.is_in_out() ? "in, out" : "out, in",
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
  if (layer.bias.defined()) {
    FLATSHARD_CHECK(
        layer.bias.sizes() ==
            at::IntArrayRef({weight.size(0), layer.out_features()}),
        usage,
        "grouped_linear: expected a bias of [{}, {}], got {}",
        weight.size(0),
        layer.out_features(),
        c10::str(layer.bias.sizes()));
    check_has_memory("grouped_linear", x, layer.bias);
    check_same_dtype("grouped_linear", x, layer.bias);
  }
}

}  // namespace

at::Tensor grouped_linear(
    const at::Tensor& x,
    const GroupedLayer& layer,
    const Groups& groups,
    const ModuleContextPtr& context) {
  check_grouped(x, 1, layer, groups);
  return GroupedLinearFunction::apply(
      x,
      layer.weight,
      as_optional(layer.bias),
      LayerCall{layer, groups},
      Permutation(),
      context);
}

at::Tensor permute_grouped_linear(
    const at::Tensor& x,
    const Permutation& permutation,
    const GroupedLayer& layer,
    const Groups& groups,
    const ModuleContextPtr& context) {
  check_grouped(x, 1, layer, groups);
  FLATSHARD_CHECK(
      x.size(0) == permutation.tokens(),
      usage,
      "permute_grouped_linear: expected x of [{}, {}], got {}",
      permutation.tokens(),
      layer.in_features(),
      c10::str(x.sizes()));
  return GroupedLinearFunction::apply(
      x,
      layer.weight,
      as_optional(layer.bias),
      LayerCall{layer, groups},
      permutation,
      context);
}

at::Tensor grouped_gated_linear(
    GateActivation activation,
    const at::Tensor& gate_up,
    const at::Tensor& row_weights,
    const GroupedLayer& layer,
    const Groups& groups,
    const ModuleContextPtr& context,
    bool is_unread) {
  check_grouped(gate_up, 2, layer, groups);
  FLATSHARD_CHECK(
      row_weights.dim() == 1 && row_weights.size(0) == gate_up.size(0) &&
          row_weights.scalar_type() == at::kFloat,
      usage,
      "grouped_gated_linear: expected float32 weights of {} rows, got {} {}",
      gate_up.size(0),
      c10::toString(row_weights.scalar_type()),
      c10::str(row_weights.sizes()));
  return GroupedGatedLinearFunction::apply(
      gate_up,
      row_weights,
      layer.weight,
      as_optional(layer.bias),
      LayerCall{layer, groups},
      activation,
      context,
      is_unread);
}

}  // namespace flatshard::nn
