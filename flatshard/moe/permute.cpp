#include "flatshard/moe/permute.h"

#include "flatshard/moe/cuda_moe.h"
#include "flatshard/nn/autograd.h"
#include "flatshard/nn/cuda_ops.h"

#include <ATen/ATen.h>

#include <vector>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Token of each row, for ATen.
at::Tensor token_of_row(const at::Tensor& order, std::int64_t slots) {
  return at::div(order, slots, "floor").to(at::kLong);
}

at::Tensor
gather_rows(const at::Tensor& x, const at::Tensor& order, std::int64_t slots) {
  if (cuda::supports(x)) {
    at::Tensor out = at::empty({order.size(0), x.size(1)}, x.options());
    cuda::permute_rows(
        x.contiguous(),
        order,
        {},
        slots,
        order.size(0),
        out,
        {});
    return out;
  }
  return x.index_select(0, token_of_row(order, slots));
}

// On CPUs, and for dtypes that the kernel does not take.
at::Tensor sum_of_slots(
    const at::Tensor& rows,
    const at::Tensor& inverse,
    const at::Tensor& addend) {
  const at::ScalarType wide =
      rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor sum =
      at::zeros({inverse.size(0), rows.size(1)}, rows.options().dtype(wide));
  if (addend.defined()) {
    sum.add_(addend.reshape(sum.sizes()).to(wide));
  }
  for (std::int64_t slot = 0; slot < inverse.size(1); ++slot) {
    const at::Tensor row = inverse.select(1, slot);
    const at::Tensor found = rows.index_select(0, row.clamp_min(0)).to(wide);
    sum.add_(found.masked_fill(row.lt(0).unsqueeze(1), 0.0));
  }
  return sum.to(rows.scalar_type());
}

at::Tensor sum_rows(
    const at::Tensor& rows,
    const at::Tensor& inverse,
    const at::Tensor& addend = {}) {
  const std::vector<std::int64_t> sizes =
      addend.defined() ? addend.sizes().vec()
                       : std::vector{inverse.size(0), rows.size(1)};
  if (!cuda::supports(rows)) {
    return sum_of_slots(rows, inverse, addend).view(sizes);
  }
  at::Tensor out = at::empty(sizes, rows.options());
  cuda::sum_rows(
      rows.contiguous(),
      {},
      inverse,
      addend.defined() ? addend.to(rows.scalar_type()).contiguous() : addend,
      out);
  return out;
}

struct PermuteRowsFunction : torch::autograd::Function<PermuteRowsFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      const at::Tensor& order,
      const at::Tensor& inverse) {
    ctx->save_for_backward({inverse});
    return gather_rows(x, order, inverse.size(1));
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("permute_rows");
    return {sum_rows(grads[0], ctx->get_saved_variables()[0]), {}, {}};
  }
};

struct SumRowsFunction : torch::autograd::Function<SumRowsFunction> {
  enum Input { kRows, kOrder, kInverse, kAddend };

  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& rows,
      const at::Tensor& order,
      const at::Tensor& inverse,
      const std::optional<at::Tensor>& addend) {
    ctx->save_for_backward({order});
    ctx->saved_data["slots"] = inverse.size(1);
    ctx->saved_data["has_addend"] = addend.has_value();
    return sum_rows(rows, inverse, addend.value_or(at::Tensor()));
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("sum_rows_of_tokens");
    variable_list out(4);
    if (ctx->needs_input_grad(kRows)) {
      out[kRows] = gather_rows(
          grads[0].reshape({-1, grads[0].size(-1)}),
          ctx->get_saved_variables()[0],
          ctx->saved_data["slots"].toInt());
    }
    if (ctx->saved_data["has_addend"].toBool()) {
      out[kAddend] = grads[0];
    }
    return out;
  }
};

struct PermuteWeightsFunction
    : torch::autograd::Function<PermuteWeightsFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& weights,
      const at::Tensor& order,
      const at::Tensor& inverse,
      bool drops) {
    ctx->save_for_backward({inverse});
    ctx->saved_data["drops"] = drops;
    return weights.flatten().index_select(0, order);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("permute_weights");
    const at::Tensor inverse = ctx->get_saved_variables()[0];
    if (!ctx->saved_data["drops"].toBool()) {
      const at::Tensor d = grads[0].index_select(0, inverse.flatten());
      return {d.view(inverse.sizes()), {}, {}, {}};
    }
    const at::Tensor d =
        grads[0].index_select(0, inverse.flatten().clamp_min(0));
    return {
        d.view(inverse.sizes()).masked_fill(inverse.lt(0), 0.0),
        {},
        {},
        {}};
  }
};

}  // namespace

Permutation sort_by_expert(
    const at::Tensor& experts,
    const at::Tensor& counts) {
  FLATSHARD_CHECK(
      experts.dim() == 2 && experts.scalar_type() == at::kInt &&
          counts.dim() == 1 && counts.scalar_type() == at::kInt,
      usage,
      "sort_by_expert: expected int32 experts [tokens, slots] and counts "
      "[experts], got {} and {}",
      c10::str(experts.sizes()),
      c10::str(counts.sizes()));
  const at::Tensor pairs = experts.contiguous();
  if (pairs.is_cuda()) {
    const auto [order, inverse] =
        cuda::sort_by_expert(pairs.flatten(), counts.contiguous());
    return {order, inverse.view(experts.sizes())};
  }
  const std::int64_t n = counts.size(0);
  const at::Tensor ends = counts.cumsum(0, at::kLong);
  // Where the next row of each expert goes; the last is of those dropped.
  std::vector<std::int64_t> next(n + 1, 0);
  std::copy_n(ends.const_data_ptr<std::int64_t>(), n, next.begin() + 1);
  Permutation result{
      at::empty({pairs.numel()}, pairs.options()),
      at::empty(pairs.sizes(), pairs.options())};
  const auto* expert = pairs.const_data_ptr<std::int32_t>();
  auto* order = result.order.mutable_data_ptr<std::int32_t>();
  auto* inverse = result.inverse.mutable_data_ptr<std::int32_t>();
  for (std::int64_t pair = 0; pair < pairs.numel(); ++pair) {
    const std::int64_t row = next[expert[pair]]++;
    order[row] = static_cast<std::int32_t>(pair);
    inverse[pair] =
        expert[pair] < n ? static_cast<std::int32_t>(row) : std::int32_t{-1};
  }
  return result;
}

at::Tensor permute_rows(const at::Tensor& x, const Permutation& permutation) {
  FLATSHARD_CHECK(
      x.dim() == 2 && x.size(0) == permutation.tokens(),
      usage,
      "permute_rows: expected x of [{}, dim], got {}",
      permutation.tokens(),
      c10::str(x.sizes()));
  return PermuteRowsFunction::apply(x, permutation.order, permutation.inverse);
}

at::Tensor sum_rows_of_tokens(
    const at::Tensor& rows,
    const Permutation& permutation,
    const at::Tensor& addend) {
  FLATSHARD_CHECK(
      rows.dim() == 2 && rows.size(0) == permutation.rows(),
      usage,
      "sum_rows_of_tokens: expected rows of [{}, dim], got {}",
      permutation.rows(),
      c10::str(rows.sizes()));
  FLATSHARD_CHECK(
      !addend.defined() ||
          (addend.numel() == permutation.tokens() * rows.size(1) &&
           addend.dim() >= 2 && addend.size(-1) == rows.size(1)),
      usage,
      "sum_rows_of_tokens: expected an addend of {} tokens and {} columns, got "
      "{}",
      permutation.tokens(),
      rows.size(1),
      c10::str(addend.sizes()));
  return SumRowsFunction::apply(
      rows,
      permutation.order,
      permutation.inverse,
      as_optional(addend));
}

at::Tensor permute_weights(
    const at::Tensor& weights,
    const Permutation& permutation) {
  return PermuteWeightsFunction::apply(
      weights,
      permutation.order,
      permutation.inverse,
      permutation.drops);
}

}  // namespace flatshard::nn
