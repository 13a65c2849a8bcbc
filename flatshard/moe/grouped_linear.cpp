#include "flatshard/moe/grouped_linear.h"

#include "flatshard/moe/cuda_moe.h"
#include "flatshard/moe/grouped_matmul.h"
#include "flatshard/nn/autograd.h"
#include "flatshard/nn/cuda_ops.h"
#include "flatshard/nn/parameter_check.h"
#include "flatshard/nn/swiglu.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

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

// The products of a layer, whichever layout its weight has.
struct LayerProducts {
  const at::Tensor& weight;
  const Groups& groups;
  bool is_in_out;

  at::Tensor forward(const at::Tensor& x) const {
    return is_in_out ? grouped_input_gradient(x, weight, groups)
                     : grouped_forward(x, weight, groups);
  }
  at::Tensor input_gradient(const at::Tensor& g) const {
    return is_in_out ? grouped_forward(g, weight, groups)
                     : grouped_input_gradient(g, weight, groups);
  }
  at::Tensor deliver_wgrad(
      const ModuleContextPtr& context,
      const at::Tensor& g,
      const at::Tensor& x) const {
    return is_in_out ? deliver_grouped_wgrad(context, weight, x, g, groups)
                     : deliver_grouped_wgrad(context, weight, g, x, groups);
  }
};

// [rows, out]: of each row its expert's. Rows after the last end have any.
at::Tensor bias_of_rows(
    const at::Tensor& bias,
    std::int64_t num_rows,
    const Groups& groups) {
  const at::Tensor group = at::searchsorted(
      groups.ends,
      at::arange(num_rows, groups.ends.options()),
      /*out_int32=*/true,
      /*right=*/true);
  const at::Tensor expert =
      group.div(groups.per_expert, "floor").clamp_max_(bias.size(0) - 1);
  return bias.index_select(0, expert.to(bias.device()));
}

// y[r] += factors[r] * bias[e], where undefined factors are 1.
void add_biases(
    const at::Tensor& y,
    const at::Tensor& bias,
    const at::Tensor& factors,
    const Groups& groups) {
  if (cuda::supports(y)) {
    cuda::add_expert_biases(bias, groups.ends, groups.per_expert, factors, y);
    return;
  }
  const at::Tensor biases = bias_of_rows(bias, y.size(0), groups);
  y.add_(
      factors.defined() ? (biases * factors.unsqueeze(1)).to(y.scalar_type())
                        : biases);
}

// dots[r] += the dot product of g[r] and bias[e], in float32.
void add_bias_dots(
    const at::Tensor& dots,
    const at::Tensor& bias,
    const at::Tensor& g,
    const Groups& groups) {
  if (cuda::supports(g)) {
    cuda::add_expert_bias_dots(bias, groups.ends, groups.per_expert, g, dots);
    return;
  }
  dots.add_((bias_of_rows(bias, g.size(0), groups) * g)
                .sum(1, /*keepdim=*/false, at::kFloat));
}

// Delivers grad[e] = the sum of factors[r] * g[r]: a product, which needs no
// number of rows on the host and reads none after the last end.
at::Tensor deliver_grouped_bias_grad(
    const ModuleContextPtr& context,
    const at::Tensor& bias,
    const at::Tensor& g,
    const at::Tensor& factors,
    const Groups& groups) {
  constexpr std::int64_t kColumns = 8;  // as one kernel wants them
  return deliver_wgrad(context, bias, [&] {
    at::Tensor sums =
        at::empty({bias.size(0), bias.size(1), kColumns}, g.options());
    const at::Tensor columns = factors.to(g.scalar_type())
                                   .unsqueeze(1)
                                   .expand({g.size(0), kColumns})
                                   .contiguous();
    grouped_weight_gradient(sums, false, g, columns, groups);
    return sums.select(2, 0).contiguous();
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
  enum Input { kX, kWeight, kBias };

  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& maybe_bias,
      const at::Tensor& ends,
      const std::optional<at::Tensor>& ordered_by,
      const std::optional<at::Tensor>& inverted_by,
      std::int64_t per_expert,
      bool is_in_out,
      const ModuleContextPtr& context) {
    save_context(ctx, context);
    ctx->saved_data["per_expert"] = per_expert;
    ctx->saved_data["is_in_out"] = is_in_out;
    const at::Tensor bias = maybe_bias.value_or(at::Tensor());
    const at::Tensor order = ordered_by.value_or(at::Tensor());
    const at::Tensor inverse = inverted_by.value_or(at::Tensor());
    const at::Tensor rows = rows_of(x, order, inverse);
    ctx->save_for_backward(
        {order.defined() ? x : rows, weight, ends, order, inverse, bias});
    const Groups groups{ends, per_expert};
    const LayerProducts layer{weight, groups, is_in_out};
    const at::Tensor y = layer.forward(rows);
    if (bias.defined()) {
      add_biases(y, bias, /*factors=*/{}, groups);
    }
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("grouped_linear");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const at::Tensor &order = saved[3], &inverse = saved[4], &bias = saved[5];
    const Groups groups{saved[2], ctx->saved_data["per_expert"].toInt()};
    const LayerProducts layer{
        weight,
        groups,
        ctx->saved_data["is_in_out"].toBool()};
    const at::Tensor g = grads[0].contiguous();
    variable_list out(9);
    if (ctx->needs_input_grad(kX)) {
      out[kX] = layer.input_gradient(g);
      if (order.defined()) {
        out[kX] = sum_rows_of_tokens(out[kX], {order, inverse});
      }
    }
    if (ctx->needs_input_grad(kWeight)) {
      out[kWeight] = layer.deliver_wgrad(
          saved_context(ctx),
          g,
          rows_of(x, order, inverse));
    }
    if (bias.defined() && ctx->needs_input_grad(kBias)) {
      out[kBias] = deliver_grouped_bias_grad(
          saved_context(ctx),
          bias,
          g,
          at::ones({g.size(0)}, g.options()),
          groups);
    }
    return out;
  }
};

// A view of the gate's columns, or with 1 of the up's.
at::Tensor
part_of(const Gate& gate, const at::Tensor& gate_up, std::int64_t which) {
  const std::int64_t width = gate_up.size(1) / 2;
  return gate.in_turn ? gate_up.unflatten(1, {width, 2}).select(2, which)
                      : gate_up.narrow(1, which * width, width);
}

// Plain operations make a dozen float tensors of so many elements at most.
constexpr std::int64_t kPlainElements = std::int64_t{1} << 22;

// Calls fn(rows) for parts of all rows, where rows(t) is this part of t.
template <class F>
void for_each_part(const at::Tensor& gate_up, F&& fn) {
  const std::int64_t all = gate_up.size(0);
  const std::int64_t most = std::max<std::int64_t>(
      1,
      2 * kPlainElements / std::max<std::int64_t>(1, gate_up.size(1)));
  for (std::int64_t begin = 0; begin < all; begin += most) {
    const std::int64_t count = std::min(most, all - begin);
    fn([begin, count](const at::Tensor& t) {
      return t.narrow(0, begin, count);
    });
  }
}

at::Tensor weighted_product(
    const Gate& gate,
    const at::Tensor& gate_up,
    const at::Tensor& row_weights) {
  at::Tensor y =
      at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
  if (cuda::has_gate_kernel(gate, gate_up)) {
    cuda::weighted_gate_forward(gate, gate_up, row_weights, y);
    return y;
  }
  for_each_part(gate_up, [&](const auto& rows) {
    rows(y).copy_(
        gated(
            gate.activation,
            part_of(gate, rows(gate_up), 0).to(at::kFloat),
            part_of(gate, rows(gate_up), 1).to(at::kFloat)) *
        rows(row_weights).unsqueeze(1));
  });
  return y;
}

struct GateGradients {
  at::Tensor gate_up;
  at::Tensor row_weights;
  at::Tensor product;
};

// `dy` is overwritten: it becomes the product.
GateGradients weighted_product_backward(
    const Gate& gate,
    const at::Tensor& dy,
    const at::Tensor& gate_up,
    const at::Tensor& row_weights) {
  GateGradients d{
      .gate_up = at::empty_like(gate_up),
      .row_weights = at::empty_like(row_weights),
      .product = dy};
  if (cuda::has_gate_kernel(gate, gate_up)) {
    cuda::weighted_gate_backward(
        gate,
        dy,
        gate_up,
        row_weights,
        d.gate_up,
        d.row_weights,
        d.product);
    return d;
  }
  for_each_part(gate_up, [&](const auto& rows) {
    const at::Tensor gates = part_of(gate, rows(gate_up), 0).to(at::kFloat);
    const at::Tensor ups = part_of(gate, rows(gate_up), 1).to(at::kFloat);
    const at::Tensor weights = rows(row_weights).unsqueeze(1);
    const at::Tensor g = rows(dy).to(at::kFloat);
    const at::Tensor product = gated(gate.activation, gates, ups);
    rows(d.row_weights).copy_((g * product).sum(1));
    const auto [dgates, dups] =
        gated_gradients(gate.activation, g * weights, gates, ups);
    part_of(gate, rows(d.gate_up), 0).copy_(dgates);
    part_of(gate, rows(d.gate_up), 1).copy_(dups);
    rows(d.product).copy_(product * weights);
  });
  return d;
}

struct GroupedGatedLinearFunction
    : torch::autograd::Function<GroupedGatedLinearFunction> {
  enum Input { kGateUp, kRowWeights, kWeight, kBias };

  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& gate_up,
      const at::Tensor& row_weights,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& maybe_bias,
      const at::Tensor& ends,
      std::int64_t per_expert,
      GateActivation activation,
      bool is_in_out,
      const ModuleContextPtr& context) {
    save_context(ctx, context);
    ctx->saved_data["per_expert"] = per_expert;
    ctx->saved_data["activation"] = static_cast<std::int64_t>(activation);
    ctx->saved_data["is_in_out"] = is_in_out;
    const at::Tensor bias = maybe_bias.value_or(at::Tensor());
    const at::Tensor rows = gate_up.contiguous();
    ctx->save_for_backward({rows, row_weights, weight, ends, bias});
    const Groups groups{ends, per_expert};
    const LayerProducts layer{weight, groups, is_in_out};
    const at::Tensor y = layer.forward(
        weighted_product({activation, is_in_out}, rows, row_weights));
    if (bias.defined()) {
      add_biases(y, bias, row_weights, groups);
    }
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("grouped_gated_linear");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &gate_up = saved[0], &row_weights = saved[1],
                     &weight = saved[2], &bias = saved[4];
    const Groups groups{saved[3], ctx->saved_data["per_expert"].toInt()};
    const bool is_in_out = ctx->saved_data["is_in_out"].toBool();
    const LayerProducts layer{weight, groups, is_in_out};
    const Gate gate{
        static_cast<GateActivation>(ctx->saved_data["activation"].toInt()),
        is_in_out};
    const at::Tensor g = grads[0].contiguous();
    variable_list out(9);
    at::Tensor product;
    if (ctx->needs_input_grad(kGateUp) || ctx->needs_input_grad(kRowWeights)) {
      GateGradients d = weighted_product_backward(
          gate,
          layer.input_gradient(g),
          gate_up,
          row_weights);
      out[kGateUp] = d.gate_up;
      if (bias.defined()) {
        add_bias_dots(d.row_weights, bias, g, groups);
      }
      out[kRowWeights] = d.row_weights;
      product = d.product;
    }
    if (ctx->needs_input_grad(kWeight)) {
      if (!product.defined()) {
        product = weighted_product(gate, gate_up, row_weights);
      }
      out[kWeight] = layer.deliver_wgrad(saved_context(ctx), g, product);
    }
    if (bias.defined() && ctx->needs_input_grad(kBias)) {
      out[kBias] = deliver_grouped_bias_grad(
          saved_context(ctx),
          bias,
          g,
          row_weights,
          groups);
    }
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
      groups.ends,
      std::optional<at::Tensor>(),
      std::optional<at::Tensor>(),
      groups.per_expert,
      layer.is_in_out(),
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
      groups.ends,
      std::optional(permutation.order),
      std::optional(permutation.inverse),
      groups.per_expert,
      layer.is_in_out(),
      context);
}

at::Tensor grouped_gated_linear(
    GateActivation activation,
    const at::Tensor& gate_up,
    const at::Tensor& row_weights,
    const GroupedLayer& layer,
    const Groups& groups,
    const ModuleContextPtr& context) {
  check_grouped(gate_up, 2, layer, groups);
  FLATSHARD_CHECK(
      row_weights.dim() == 1 && row_weights.size(0) == gate_up.size(0) &&
          row_weights.scalar_type() == at::kFloat,
      usage,
      "grouped_swiglu_linear: expected float32 weights of {} rows, got {} {}",
      gate_up.size(0),
      c10::toString(row_weights.scalar_type()),
      c10::str(row_weights.sizes()));
  return GroupedGatedLinearFunction::apply(
      gate_up,
      row_weights,
      layer.weight,
      as_optional(layer.bias),
      groups.ends,
      groups.per_expert,
      activation,
      layer.is_in_out(),
      context);
}

}  // namespace flatshard::nn
