#include "flatshard/moe/permute.h"

#include "flatshard/moe/cuda_moe.h"
#include "flatshard/nn/autograd.h"
#include "flatshard/nn/cuda_ops.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <numeric>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Elements that a thread takes at least.
constexpr std::int64_t kElements = 16384;

// Token of each row, for ATen.
at::Tensor token_of_row(const at::Tensor& order, std::int64_t slots) {
  return at::div(order, slots, "floor").to(at::kLong);
}

at::Tensor
gather_rows(const at::Tensor& x, const at::Tensor& order, std::int64_t slots) {
  if (cuda::supports(x)) {
    at::Tensor out = at::empty({order.size(0), x.size(1)}, x.options());
    cuda::permute_rows(x.contiguous(), order, slots, out);
    return out;
  }
  return x.index_select(0, token_of_row(order, slots));
}

void sum_on_cpu(
    const at::Tensor& rows,
    const at::Tensor& inverse,
    const at::Tensor& first,
    const at::Tensor& second,
    at::Tensor& out) {
  const std::int64_t slots = inverse.size(1);
  const std::int64_t dim = rows.size(1);
  const auto* row_of = inverse.const_data_ptr<std::int32_t>();
  const auto* from = rows.const_data_ptr<float>();
  const auto* a = first.defined() ? first.const_data_ptr<float>() : nullptr;
  const auto* b = second.defined() ? second.const_data_ptr<float>() : nullptr;
  auto* to = out.mutable_data_ptr<float>();
  const std::int64_t grain = std::max<std::int64_t>(1, kElements / (dim + 1));
  at::parallel_for(
      0,
      inverse.size(0),
      grain,
      [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
          float* y = to + t * dim;
          for (std::int64_t i = 0; i < dim; ++i) {
            y[i] = (a != nullptr ? a[t * dim + i] : 0.0F) +
                   (b != nullptr ? b[t * dim + i] : 0.0F);
          }
          for (std::int64_t j = 0; j < slots; ++j) {
            const std::int64_t r = row_of[t * slots + j];
            for (std::int64_t i = 0; r >= 0 && i < dim; ++i) {
              y[i] += from[r * dim + i];
            }
          }
        }
      });
}

// For dtypes that the kernel does not take.
at::Tensor sum_of_slots(
    const at::Tensor& rows,
    const at::Tensor& inverse,
    const at::Tensor& first,
    const at::Tensor& second) {
  const at::ScalarType wide =
      rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor sum =
      at::zeros({inverse.size(0), rows.size(1)}, rows.options().dtype(wide));
  for (const at::Tensor& addend : {first, second}) {
    if (addend.defined()) {
      sum.add_(addend.reshape(sum.sizes()).to(wide));
    }
  }
  for (std::int64_t slot = 0; slot < inverse.size(1); ++slot) {
    const at::Tensor row = inverse.select(1, slot);
    const at::Tensor found = rows.index_select(0, row.clamp_min(0)).to(wide);
    sum.add_(found.masked_fill(row.lt(0).unsqueeze(1), 0.0));
  }
  return sum;
}

at::Tensor sum_rows(
    const at::Tensor& rows,
    const at::Tensor& inverse,
    const at::Tensor& first = {},
    const at::Tensor& second = {}) {
  const auto contiguous = [](const at::Tensor& t, at::ScalarType dtype) {
    return t.defined() ? t.to(dtype).contiguous() : t;
  };
  at::Tensor out =
      first.defined()
          ? at::empty(first.sizes(), rows.options())
          : at::empty({inverse.size(0), rows.size(1)}, rows.options());
  const at::ScalarType dtype = rows.scalar_type();
  if (cuda::supports(rows)) {
    cuda::sum_rows_of_tokens(
        rows.contiguous(),
        inverse,
        contiguous(first, dtype),
        contiguous(second, dtype),
        out);
    return out;
  }
  if (!rows.is_cpu()) {
    const at::Tensor sum = sum_of_slots(rows, inverse, first, second).to(dtype);
    return sum.view(out.sizes());
  }
  at::Tensor sum =
      dtype == at::kFloat
          ? out
          : at::empty(out.sizes(), out.options().dtype(at::kFloat));
  const at::Tensor on_host = contiguous(rows, at::kFloat);
  sum_on_cpu(
      on_host,
      inverse,
      contiguous(first, at::kFloat),
      contiguous(second, at::kFloat),
      sum);
  return dtype == at::kFloat ? out : sum.to(dtype);
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
  enum Input { kRows, kOrder, kInverse, kFirst, kSecond };

  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& rows,
      const at::Tensor& order,
      const at::Tensor& inverse,
      const std::optional<at::Tensor>& first,
      const std::optional<at::Tensor>& second) {
    ctx->save_for_backward({order});
    ctx->saved_data["slots"] = inverse.size(1);
    ctx->saved_data["first"] = first.has_value();
    ctx->saved_data["second"] = second.has_value();
    if (second) {
      ctx->saved_data["second_shape"] = second->sizes();
    }
    return sum_rows(
        rows,
        inverse,
        first.value_or(at::Tensor()),
        second.value_or(at::Tensor()));
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("sum_rows_of_tokens");
    variable_list out(5);
    if (ctx->needs_input_grad(kRows)) {
      out[kRows] = gather_rows(
          grads[0].reshape({-1, grads[0].size(-1)}),
          ctx->get_saved_variables()[0],
          ctx->saved_data["slots"].toInt());
    }
    if (ctx->saved_data["first"].toBool()) {
      out[kFirst] = grads[0];
    }
    if (ctx->saved_data["second"].toBool()) {
      out[kSecond] =
          grads[0].view(ctx->saved_data["second_shape"].toIntVector());
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
    const at::Tensor& first,
    const at::Tensor& second) {
  FLATSHARD_CHECK(
      rows.dim() == 2 && rows.size(0) == permutation.rows(),
      usage,
      "sum_rows_of_tokens: expected rows of [{}, dim], got {}",
      permutation.rows(),
      c10::str(rows.sizes()));
  for (const at::Tensor& addend : {first, second}) {
    FLATSHARD_CHECK(
        !addend.defined() ||
            (addend.numel() == permutation.tokens() * rows.size(1) &&
             addend.dim() >= 2 && addend.size(-1) == rows.size(1)),
        usage,
        "sum_rows_of_tokens: expected addends of {} tokens and {} columns, got "
        "{}",
        permutation.tokens(),
        rows.size(1),
        c10::str(addend.sizes()));
  }
  return SumRowsFunction::apply(
      rows,
      permutation.order,
      permutation.inverse,
      as_optional(first),
      as_optional(second));
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
