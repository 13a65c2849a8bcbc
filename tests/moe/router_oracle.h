#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "flatshard/moe/router.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace flatshard::nn {

inline at::Generator seeded(std::uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

/// Scores of route(), in float64 and differentiable.
inline at::Tensor oracle_scores(
    const at::Tensor& logits,
    const RouterOptions& options) {
  return options.score == RouterScore::softmax ? at::softmax(logits, -1)
                                               : at::sigmoid(logits);
}

/// Returns the experts of one token: all sorted by (score + bias, index).
inline std::vector<std::int64_t> oracle_choice(
    const std::vector<double>& scores,
    const RouterOptions& o) {
  const auto n = static_cast<std::int64_t>(scores.size());
  const std::int64_t size = n / o.groups;
  const auto order_of = [](std::int64_t count, auto&& value) {
    std::vector<std::int64_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
      return value(a) > value(b);
    });
    return order;
  };
  std::vector<double> groups(o.groups);
  for (std::int64_t g = 0; g < o.groups; ++g) {
    std::vector<double> mine(
        scores.begin() + g * size,
        scores.begin() + (g + 1) * size);
    std::sort(mine.rbegin(), mine.rend());
    groups[g] = mine[0] + (size > 1 ? mine[1] : 0.0);
  }
  auto kept = order_of(o.groups, [&](auto g) { return groups[g]; });
  kept.resize(o.kept_groups);
  std::vector<std::int64_t> found;
  for (const std::int64_t e : order_of(n, [&](auto i) { return scores[i]; })) {
    if (std::find(kept.begin(), kept.end(), e / size) != kept.end()) {
      found.push_back(e);
    }
  }
  found.resize(o.experts_per_token);
  return found;
}

/// int64 [tokens, k] of float64 scores.
inline at::Tensor oracle_experts(
    const at::Tensor& scores,
    const at::Tensor& bias,
    const RouterOptions& o) {
  const at::Tensor choice =
      (bias.defined() ? scores + bias.to(at::kDouble) : scores)
          .detach()
          .contiguous();
  at::Tensor experts = at::empty(
      {choice.size(0), o.experts_per_token},
      at::TensorOptions().dtype(at::kLong));
  for (std::int64_t t = 0; t < choice.size(0); ++t) {
    const auto* row = choice[t].const_data_ptr<double>();
    const auto found =
        oracle_choice(std::vector<double>(row, row + choice.size(1)), o);
    for (std::size_t j = 0; j < found.size(); ++j) {
      experts[t][static_cast<std::int64_t>(j)] = found[j];
    }
  }
  return experts;
}

/// Returns the weights of chosen experts, differentiable.
inline at::Tensor oracle_weights(
    const at::Tensor& scores,
    const at::Tensor& experts,
    const RouterOptions& o) {
  at::Tensor weights = scores.gather(1, experts);
  if (o.normalize) {
    weights = weights / (weights.sum(-1, true) + o.epsilon);
  }
  return weights * o.scale;
}

/// aux_loss and z_loss with their coefficients, differentiable.
inline at::Tensor oracle_losses(
    const at::Tensor& logits,
    const at::Tensor& counts,
    const RouterOptions& o) {
  at::Tensor p = oracle_scores(logits, o);
  if (o.score == RouterScore::sigmoid) {
    p = p / p.sum(-1, true);
  }
  const double choices =
      static_cast<double>(logits.size(0) * o.experts_per_token);
  const at::Tensor balance =
      (counts.to(at::kDouble) / choices * p.mean(0)).sum() *
      static_cast<double>(logits.size(1));
  return balance * o.aux_loss + logits.logsumexp(-1).square().mean() * o.z_loss;
}

/// Rules that differ in every respect that a router has.
inline std::vector<RouterOptions> router_rules() {
  return {
      {.experts_per_token = 2},
      {.experts_per_token = 1, .normalize = false},
      {.experts_per_token = 3, .normalize = false, .scale = 2.5},
      {.experts_per_token = 2, .aux_loss = 0.3, .z_loss = 0.2},
      {.experts_per_token = 3,
       .score = RouterScore::sigmoid,
       .epsilon = 1e-20,
       .scale = 2.5,
       .groups = 4,
       .kept_groups = 2},
      {.experts_per_token = 2,
       .score = RouterScore::sigmoid,
       .normalize = false,
       .groups = 8,
       .kept_groups = 3,
       .aux_loss = 0.3,
       .z_loss = 0.2},
      {.experts_per_token = 8, .groups = 2, .kept_groups = 1}};
}

}  // namespace flatshard::nn
