#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "flatshard/moe/router_args.h"
#include "flatshard/nn/parallel/context_parallel.h"
#include "flatshard/nn/parallel/tensor_parallel.h"

#include <cstdint>

namespace flatshard::nn {

struct RouterOptions {
  std::int64_t experts_per_token = 2;
  RouterScore score = RouterScore::softmax;
  /// Weights of a token add up to `scale`; else they are its scores, scaled.
  bool normalize = true;
  double epsilon = 0.0;  ///< added to the sum that normalizes
  double scale = 1.0;
  /// Number of groups of adjacent experts. A token keeps the `kept_groups`
  /// groups whose two best experts have the highest sum of scores.
  std::int64_t groups = 1;
  std::int64_t kept_groups = 1;
  /// Coefficients of losses whose gradients the router's backward adds.
  double aux_loss = 0.0;
  double z_loss = 0.0;
  /// Each of these ranks routes an equal part of the tokens, and the gradients
  /// of all of them are summed: the auxiliary losses count all tokens, once.
  /// Null: all tokens are here.
  TensorParallelPtr ranks = nullptr;
  /// The same for ranks whose gradients are averaged.
  ContextParallelPtr context = nullptr;

  /// @throws Error{config} naming the member and its valid values.
  void check(std::int64_t num_experts) const;
};

/// Sums x over all ranks of `options`. Only for small tensors.
at::Tensor sum_over_ranks(const RouterOptions& options, const at::Tensor& x);

/// Gradient of the loss that auxiliary losses are added to. A model's head
/// writes it at the start of its backward, routers read it in their backward.
/// So a loss divided by the number of microbatches divides them as well.
struct LossGradient : torch::CustomClassHolder {
  at::Tensor value;  ///< [] float32; undefined: 1
};
using LossGradientPtr = c10::intrusive_ptr<LossGradient>;

/// The chosen experts of each token.
struct Routing {
  /// int32 [tokens, experts_per_token], the best first. num_experts marks a
  /// dropped token.
  at::Tensor experts;
  at::Tensor weights;  ///< float32 [tokens, experts_per_token]
  /// int32 [num_experts]: tokens for each expert, without padding
  at::Tensor counts;

  /// Lets hooks of modules see the tensors that have a gradient.
  template <class F>
  friend void for_each_tensor(const Routing& routing, F&& fn) {
    if (routing.weights.defined()) {
      fn(routing.weights);
    }
  }
};

/// Options of one call of `route`.
struct RouteOptions {
  /// Result of an earlier call for the same tokens, or null: its experts are
  /// reused, and only the weights are new.
  const Routing* chosen = nullptr;
  LossGradientPtr loss_gradient;  ///< null: 1
  /// bool [tokens]: tokens that the counts and the auxiliary losses leave out;
  /// undefined: none. Defined on all ranks of RouterOptions, or on none.
  at::Tensor padding;
};

/// Chooses experts by score + bias and weighs them only by score. Among equal
/// scores the lowest index wins, and a NaN never wins, so each token has
/// experts_per_token different experts for any logits.
///
/// The gradient of `weights` is differentiated through the scores. The
/// auxiliary losses of RouterOptions add their gradients in the same pass:
/// - aux_loss * E * sum_e f_e P_e, with f_e the fraction of all choices that
///   chose expert e and P_e the mean of its probability. It is 1 when balanced.
///   Probabilities are softmax scores, or sigmoid scores over their sum.
/// - z_loss * mean of logsumexp(logits)^2.
///
/// @param logits  float32 [tokens, num_experts]
/// @param bias    float32 [num_experts] or undefined; gets no gradient.
/// Source: Fedus et al., arXiv:2101.03961 (aux); Zoph et al., arXiv:2202.08906
/// (z); DeepSeek-V3, arXiv:2412.19437 (sigmoid, groups, bias).
Routing route(
    const at::Tensor& logits,
    const at::Tensor& bias,
    const RouterOptions& options,
    const RouteOptions& call = {});

/// Returns the value of the load-balancing loss without its coefficient, []
/// float32: 1 when experts are chosen equally often, or by equal probabilities.
/// It counts the tokens of all ranks of `options`; collective there.
/// @param padding  see RouteOptions
at::Tensor load_balance(
    const at::Tensor& logits,
    const at::Tensor& counts,
    const RouterOptions& options,
    const at::Tensor& padding = {});

/// Returns `experts` with num_experts for tokens that are padding.
/// @param padding  see RouteOptions
at::Tensor without_padding(
    const at::Tensor& experts,
    const at::Tensor& padding,
    std::int64_t num_experts);

/// Returns the number of tokens that the counts have, [] float64, or 1 / k for
/// none.
at::Tensor num_counted(const at::Tensor& counts, const RouterOptions& options);

/// Returns the choices with num_experts for padding tokens, so that they have
/// no rows. The counts have none of them already.
Routing drop_padding(const Routing& routing, const at::Tensor& padding);

/// Drops choices beyond the capacity of an expert: `factor` times the average
/// of the counted choices per expert, rounded up. The tokens with the lowest
/// weights are dropped first, of equal ones the later. Their expert becomes
/// num_experts; weights are unchanged.
/// @param drops  whether choices of num_experts are among them: the number of
///   choices is computed on the device then.
Routing
drop_beyond_capacity(const Routing& routing, double factor, bool drops = false);

/// Returns experts[t, j] = (t * k + j) % num_experts instead of a choice by
/// scores, for measuring: every expert gets as many tokens as any other, within
/// one.
Routing balanced_choice(
    std::int64_t tokens,
    std::int64_t num_experts,
    std::int64_t experts_per_token,
    at::Device device);

/// Returns `loss` unchanged and passes its gradient to `to` when its backward
/// runs.
at::Tensor tell_gradient(const at::Tensor& loss, const LossGradientPtr& to);

}  // namespace flatshard::nn
