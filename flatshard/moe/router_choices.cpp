// Counts and drops choices, without gradients.
#include "flatshard/core/error.h"
#include "flatshard/moe/router.h"

#include <ATen/ATen.h>

#include <cmath>
#include <tuple>

namespace flatshard::nn {

at::Tensor without_padding(
    const at::Tensor& experts,
    const at::Tensor& padding,
    std::int64_t num_experts) {
  return padding.defined()
             ? experts.masked_fill(padding.unsqueeze(1), num_experts)
             : experts;
}

at::Tensor num_counted(const at::Tensor& counts, const RouterOptions& options) {
  return counts.sum().to(at::kDouble).clamp_min(1.0) /
         static_cast<double>(options.experts_per_token);
}

at::Tensor sum_over_ranks(const RouterOptions& options, const at::Tensor& x) {
  return sum_over_ranks(options.context, sum_over_ranks(options.ranks, x));
}

at::Tensor load_balance(
    const at::Tensor& logits,
    const at::Tensor& counts,
    const RouterOptions& options,
    const at::Tensor& padding) {
  const at::NoGradGuard no_grad;
  at::Tensor p;
  if (options.score == RouterScore::softmax) {
    p = at::softmax(logits, -1);
  } else {
    p = at::sigmoid(logits);
    p = p / p.sum(-1, /*keepdim=*/true);
  }
  if (padding.defined()) {
    p = p.masked_fill(padding.unsqueeze(1), 0.0);
  }
  const at::Tensor sum = sum_over_ranks(options, p.sum(0));
  const at::Tensor load = sum_over_ranks(options, counts);
  const at::Tensor tokens = num_counted(load, options);
  const auto num_experts = static_cast<double>(logits.size(1));
  const auto slots = static_cast<double>(options.experts_per_token);
  return ((sum * load).sum() / tokens.square() * (num_experts / slots))
      .to(at::kFloat);
}

Routing drop_padding(const Routing& routing, const at::Tensor& padding) {
  return {
      .experts =
          without_padding(routing.experts, padding, routing.counts.size(0)),
      .weights = routing.weights,
      .counts = routing.counts};
}

namespace {

// @param capacity  a number, or [] int64 on the device
template <class Capacity>
Routing drop_beyond(const Routing& routing, const Capacity& capacity) {
  const at::NoGradGuard no_grad;
  const at::Tensor experts = routing.experts.flatten();
  // Sorts by expert, and by weight within an expert: the second sort keeps the
  // order of the first.
  const at::Tensor by_weight = std::get<1>(at::sort(
      routing.weights.detach().flatten(),
      /*stable=*/true,
      /*dim=*/0,
      /*descending=*/true));
  const auto [sorted, by_expert] = at::sort(
      experts.index_select(0, by_weight),
      /*stable=*/true,
      /*dim=*/0,
      /*descending=*/false);
  // The last one is of choices that were dropped already.
  const at::Tensor begins = at::constant_pad_nd(
      routing.counts.cumsum(0, at::kLong) - routing.counts,
      {0, 1});
  const at::Tensor place = at::arange(sorted.numel(), begins.options()) -
                           begins.index_select(0, sorted);
  const auto none = routing.counts.size(0);
  const at::Tensor kept =
      at::where(place < capacity, sorted, at::full_like(sorted, none));
  at::Tensor left = at::empty_like(experts);
  left.index_copy_(0, by_weight.index_select(0, by_expert), kept);
  return {
      .experts = left.view(routing.experts.sizes()),
      .weights = routing.weights,
      .counts = routing.counts.clamp_max(capacity)};
}

}  // namespace

Routing
drop_beyond_capacity(const Routing& routing, double factor, bool drops) {
  const auto num_experts = static_cast<double>(routing.counts.size(0));
  if (drops) {
    const at::Tensor share = routing.counts.sum().to(at::kDouble) / num_experts;
    return drop_beyond(routing, (share * factor).ceil().to(at::kInt));
  }
  const double share =
      static_cast<double>(routing.experts.numel()) / num_experts;
  return drop_beyond(
      routing,
      static_cast<std::int64_t>(std::ceil(factor * share)));
}

Routing balanced_choice(
    std::int64_t tokens,
    std::int64_t num_experts,
    std::int64_t experts_per_token,
    at::Device device) {
  const at::TensorOptions ints =
      at::TensorOptions().dtype(at::kInt).device(device);
  const std::int64_t pairs = tokens * experts_per_token;
  const at::Tensor experts = at::arange(pairs, ints).remainder(num_experts);
  const at::Tensor index = at::arange(num_experts, ints);
  return {
      .experts = experts.view({tokens, experts_per_token}),
      .counts = at::where(
                    index < pairs % num_experts,
                    at::full_like(index, pairs / num_experts + 1),
                    at::full_like(index, pairs / num_experts))
                    .to(at::kInt)};
}

}  // namespace flatshard::nn
