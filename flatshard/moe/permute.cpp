#include "flatshard/moe/permute.h"

#include "flatshard/core/rounding.h"
#include "flatshard/moe/cuda_moe.h"
#include "flatshard/nn/autograd.h"
#include "flatshard/nn/second_run.h"
#include "flatshard/ops/cuda_ops.h"

#include <ATen/ATen.h>

#include <tuple>
#include <vector>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int32_t kDropped = -1;

at::Tensor gather_rows(const at::Tensor& x, const Permutation& permutation) {
  at::Tensor out = at::empty({permutation.rows(), x.size(1)}, x.options());
  permute_rows_into(x.contiguous(), permutation, {}, out, {});
  return out;
}

// On CPUs, and for dtypes that the kernel does not support.
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
  const std::int64_t slots = rows.size(0) == 0 ? 0 : inverse.size(1);
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    const at::Tensor row = inverse.select(1, slot);
    const at::Tensor found = rows.index_select(0, row.clamp_min(0)).to(wide);
    sum.add_(found.masked_fill(row.lt(0).unsqueeze(1), 0.0));
  }
  return sum.to(rows.scalar_type());
}

void sum_rows_by_kernel(
    const at::Tensor& rows,
    const at::Tensor& staying,
    const at::Tensor& places,
    const at::Tensor& addend,
    const at::Tensor& out) {
  const at::Tensor added =
      addend.defined() ? addend.to(rows.scalar_type()).contiguous() : addend;
  cuda::launch(
      kernels::SumRows{
          .rows = cuda::rows_in(rows),
          .staying = cuda::rows_in(staying),
          .places = places.const_data_ptr<std::int32_t>(),
          .addend = cuda::rows_in(added),
          .out = out.mutable_data_ptr(),
          .tokens = places.size(0),
          .slots = places.size(1),
          .dim = rows.size(1),
          .dtype = cuda::dtype_of(rows)},
      rows.device());
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
  sum_rows_by_kernel(rows.contiguous(), {}, inverse, addend, out);
  return out;
}

void check_rows(
    const char* what,
    const at::Tensor& leaving,
    const at::Tensor& staying) {
  FLATSHARD_CHECK(
      leaving.dim() == 2 && staying.dim() == 2 &&
          leaving.size(1) == staying.size(1) && leaving.is_contiguous() &&
          staying.is_contiguous() &&
          leaving.scalar_type() == staying.scalar_type(),
      usage,
      "{}: expected contiguous rows of one size and dtype, got {} {} and {} {}",
      what,
      c10::str(leaving.sizes()),
      c10::toString(leaving.scalar_type()),
      c10::str(staying.sizes()),
      c10::toString(staying.scalar_type()));
}

void save_permutation(AutogradContext* ctx, const Permutation& permutation) {
  ctx->save_for_backward({permutation.order, permutation.inverse});
  ctx->saved_data["drops"] = permutation.drops;
}

Permutation saved_permutation(AutogradContext* ctx) {
  const variable_list both = ctx->get_saved_variables();
  return {both[0], both[1], ctx->saved_data["drops"].toBool()};
}

struct PermuteRowsFunction : torch::autograd::Function<PermuteRowsFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      const Permutation& permutation) {
    save_permutation(ctx, permutation);
    return gather_rows(x, permutation);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("permute_rows");
    return {sum_rows(grads[0], saved_permutation(ctx).inverse), {}};
  }
};

struct SumRowsFunction : torch::autograd::Function<SumRowsFunction> {
  enum Input { kRows, kAddend };

  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& rows,
      const std::optional<at::Tensor>& addend,
      const Permutation& permutation,
      bool is_unread) {
    save_permutation(ctx, permutation);
    ctx->saved_data["has_addend"] = addend.has_value();
    if (is_unread) {
      const std::vector<std::int64_t> sizes{permutation.tokens(), rows.size(1)};
      return without_values(
          addend ? addend->sizes() : at::IntArrayRef(sizes),
          rows.options());
    }
    return sum_rows(rows, permutation.inverse, addend.value_or(at::Tensor()));
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("sum_rows_of_tokens");
    variable_list out(4);
    if (ctx->needs_input_grad(kRows)) {
      out[kRows] = gather_rows(as_rows(grads[0]), saved_permutation(ctx));
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
      const Permutation& permutation) {
    save_permutation(ctx, permutation);
    return weights.flatten().index_select(0, permutation.order);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("permute_weights");
    const Permutation permutation = saved_permutation(ctx);
    const at::Tensor& inverse = permutation.inverse;
    const at::Tensor row = inverse.flatten();
    const at::Tensor d =
        grads[0]
            .index_select(0, permutation.drops ? row.clamp_min(0) : row)
            .view(inverse.sizes());
    return {permutation.drops ? d.masked_fill(inverse.lt(0), 0.0) : d, {}};
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
    const std::int64_t num_experts = counts.size(0);
    const std::int64_t blocks = ceil_div(pairs.numel(), kernels::kSortPairs);
    const at::Tensor kept = counts.contiguous();
    const at::Tensor bases =
        at::empty({blocks, num_experts + 1}, pairs.options());
    const at::Tensor order = at::empty({pairs.numel()}, pairs.options());
    const at::Tensor inverse = at::empty_like(pairs);
    cuda::launch(
        kernels::SortByExpert{
            .experts = pairs.const_data_ptr<std::int32_t>(),
            .counts = kept.const_data_ptr<std::int32_t>(),
            .bases = bases.mutable_data_ptr<std::int32_t>(),
            .order = order.mutable_data_ptr<std::int32_t>(),
            .inverse = inverse.mutable_data_ptr<std::int32_t>(),
            .pairs = pairs.numel(),
            .num_experts = num_experts},
        pairs.device());
    return {order, inverse};
  }
  const at::Tensor order =
      std::get<1>(at::sort(pairs.flatten(), /*stable=*/true, /*dim=*/0, false));
  const auto num_kept = counts.sum().item<std::int64_t>();
  const at::Tensor inverse = at::full_like(pairs, kDropped);
  inverse.view({-1}).index_copy_(
      0,
      order.narrow(0, 0, num_kept),
      at::arange(num_kept, pairs.options()));
  return {order.to(at::kInt), inverse};
}

at::Tensor count_experts(const at::Tensor& experts, std::int64_t num_experts) {
  if (experts.is_cuda()) {
    const at::Tensor all = experts.contiguous();
    const at::Tensor counts = at::empty({num_experts}, all.options());
    cuda::launch(
        kernels::CountExperts{
            .experts = all.const_data_ptr<std::int32_t>(),
            .counts = counts.mutable_data_ptr<std::int32_t>(),
            .pairs = all.numel(),
            .num_experts = num_experts},
        all.device());
    return counts;
  }
  return at::bincount(experts.flatten(), {}, num_experts)
      .narrow(0, 0, num_experts)
      .to(at::kInt);
}

ExpertOrder order_by_expert(
    const at::Tensor& experts,
    std::int64_t num_experts) {
  FLATSHARD_CHECK(
      experts.dim() == 2 &&
          at::isIntegralType(experts.scalar_type(), /*includeBool=*/false),
      usage,
      "order_by_expert: expected integers [tokens, slots], got {} {}",
      c10::toString(experts.scalar_type()),
      c10::str(experts.sizes()));
  const at::Tensor chosen = experts.to(at::kInt);
  ExpertOrder order;
  order.counts = count_experts(chosen, num_experts);
  FLATSHARD_CHECK(
      chosen.is_cuda() ||
          order.counts.sum().item<std::int64_t>() == chosen.numel(),
      usage,
      "order_by_expert: expected experts below {}, got {}",
      num_experts,
      chosen.max().item<std::int64_t>());
  order.permutation = sort_by_expert(chosen, order.counts);
  order.permutation.drops = false;
  return order;
}

void permute_rows_into(
    const at::Tensor& x,
    const Permutation& permutation,
    const at::Tensor& places,
    const at::Tensor& leaving,
    const at::Tensor& staying) {
  if (places.defined()) {
    check_rows("permute_rows_into", leaving, staying);
  }
  if (cuda::supports(x)) {
    cuda::launch(
        kernels::PermuteRows{
            .x = cuda::rows_in(x),
            .order = permutation.order.const_data_ptr<std::int32_t>(),
            .places = cuda::data_of<std::int32_t>(places),
            .out = leaving.mutable_data_ptr(),
            .staying = cuda::rows_in(staying),
            .rows = permutation.rows(),
            .dim = x.size(1),
            .per_token = permutation.slots(),
            .dtype = cuda::dtype_of(x)},
        x.device());
    return;
  }
  if (permutation.rows() == 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor tokens =
      at::div(permutation.order, permutation.slots(), "floor").to(at::kLong);
  at::Tensor out = leaving;
  if (!places.defined()) {
    at::index_select_out(out, x, 0, tokens);
    return;
  }
  const at::Tensor leaves = places.ge(0);
  const auto copy = [&](const at::Tensor& to,
                        const at::Tensor& index,
                        const at::Tensor& which) {
    to.index_copy_(
        0,
        index.masked_select(which).to(at::kLong),
        x.index_select(0, tokens.masked_select(which)));
  };
  copy(leaving, places, leaves);
  copy(staying, -2 - places, leaves.logical_not());
}

at::Tensor permute_rows(const at::Tensor& x, const Permutation& permutation) {
  FLATSHARD_CHECK(
      x.dim() == 2 && x.size(0) == permutation.tokens(),
      usage,
      "permute_rows: expected x of [{}, dim], got {}",
      permutation.tokens(),
      c10::str(x.sizes()));
  return PermuteRowsFunction::apply(x, permutation);
}

at::Tensor sum_rows_of_tokens(
    const at::Tensor& rows,
    const Permutation& permutation,
    const at::Tensor& addend,
    bool is_unread) {
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
      as_optional(addend),
      permutation,
      is_unread);
}

at::Tensor permute_weights(
    const at::Tensor& weights,
    const Permutation& permutation) {
  return PermuteWeightsFunction::apply(weights, permutation);
}

bool can_split_rows(const at::Tensor& rows) {
  return rows.is_cpu() || cuda::supports(rows);
}

RowPlaces row_places(
    const Permutation& permutation,
    const at::Tensor& runs,
    std::int64_t num_rows) {
  RowPlaces places{
      .of_rows = at::empty_like(permutation.order),
      .of_pairs = at::empty_like(permutation.inverse)};
  if (permutation.order.is_cuda()) {
    cuda::launch(
        kernels::PlaceRows{
            .order = permutation.order.const_data_ptr<std::int32_t>(),
            .runs = runs.const_data_ptr<std::int32_t>(),
            .of_rows = places.of_rows.mutable_data_ptr<std::int32_t>(),
            .of_pairs = places.of_pairs.mutable_data_ptr<std::int32_t>(),
            .num_runs = static_cast<int>(runs.size(1) - 1),
            .num_rows = num_rows,
            .rows = permutation.rows()},
        runs.device());
    return places;
  }
  at::arange_out(places.of_rows, permutation.rows());
  const at::Tensor begins = runs[0];
  // -1 before the first run, `last` + 1 after the last.
  const at::Tensor run =
      at::searchsorted(begins, places.of_rows, false, /*right=*/true) - 1;
  const std::int64_t last = runs.size(1) - 2;
  const at::Tensor known = run.clamp(0, last);
  const at::Tensor staying = runs[1].index_select(0, known) + places.of_rows -
                             begins.index_select(0, known);
  places.of_rows = at::where(run.eq(known), -2 - staying, places.of_rows);
  places.of_rows.slice(0, num_rows).fill_(kDropped);
  places.of_pairs.view({-1}).index_copy_(
      0,
      permutation.order.to(at::kLong),
      places.of_rows);
  return places;
}

void sum_rows_from(
    const at::Tensor& leaving,
    const at::Tensor& staying,
    const RowPlaces& places,
    const at::Tensor& addend,
    const at::Tensor& out) {
  check_rows("sum_rows_from", leaving, staying);
  const at::NoGradGuard no_grad;
  if (cuda::supports(leaving)) {
    sum_rows_by_kernel(leaving, staying, places.of_pairs, addend, out);
    return;
  }
  const at::Tensor& place = places.of_pairs;
  const at::Tensor row =
      at::where(place.lt(kDropped), leaving.size(0) - 2 - place, place);
  out.copy_(
      sum_of_slots(at::cat({leaving, staying}), row, addend).view(out.sizes()));
}

}  // namespace flatshard::nn
