#include "flatshard/moe/router.h"

#include "flatshard/moe/cuda_moe.h"
#include "flatshard/moe/permute.h"
#include "flatshard/nn/autograd.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

RouterRule rule_of(const RouterOptions& options, std::int64_t num_experts) {
  return {
      .num_experts = num_experts,
      .experts_per_token = options.experts_per_token,
      .groups = options.groups,
      .kept_groups = options.kept_groups,
      .score = options.score,
      .normalize = options.normalize,
      .epsilon = static_cast<float>(options.epsilon),
      .scale = static_cast<float>(options.scale)};
}

// The state of a node in addition to logits. It gets no gradient.
struct RouterState : torch::CustomClassHolder {
  RouterOptions options;
  LossGradientPtr loss_gradient;
  at::Tensor bias;
  at::Tensor padding;  // or undefined
  at::Tensor experts;  // given, or chosen by the forward
  at::Tensor counts;
  at::Tensor load;  // counts of all ranks' tokens
};

// The gradient of aux_loss divides by the tokens of this rank twice, for f and
// for P, and the gradient of z_loss once. Both losses count the tokens of all
// ranks. With padding the tokens come from the counts of all ranks. A mean over
// ranks divides once more than their sum.
float shared_coefficient(
    double coefficient,
    int divisions,
    const RouterState& state) {
  const RouterOptions& options = state.options;
  const int context = options.context ? options.context->num_ranks() : 1;
  const int all = context * (options.ranks ? options.ranks->size() : 1);
  const int num_ranks = state.padding.defined() ? 1 : all;
  return static_cast<float>(
      coefficient * context / std::pow(num_ranks, divisions));
}

// Returns the counts of all ranks' tokens, where a loss needs them.
at::Tensor load_of(const RouterState& state) {
  const RouterOptions& options = state.options;
  const bool is_needed =
      options.aux_loss > 0 || (options.z_loss > 0 && state.padding.defined());
  return is_needed ? sum_over_ranks(options, state.counts) : state.counts;
}

// -- on CPUs -----------------------------------------------------------------

at::Tensor scores_of(const at::Tensor& logits, const RouterOptions& options) {
  return options.score == RouterScore::softmax ? at::softmax(logits, -1)
                                               : at::sigmoid(logits);
}

// Indices of the `n` largest of each row, among equal ones the lowest.
at::Tensor best_of(const at::Tensor& values, std::int64_t n) {
  const auto order = std::get<1>(
      at::sort(values, /*stable=*/true, /*dim=*/-1, /*descending=*/true));
  return order.narrow(-1, 0, n);
}

at::Tensor choose(
    const at::Tensor& scores,
    const at::Tensor& bias,
    const RouterOptions& options) {
  // A NaN loses against numbers, but not against what may not be chosen.
  at::Tensor choice = (bias.defined() ? scores + bias : scores)
                          .nan_to_num(std::numeric_limits<float>::lowest());
  if (options.kept_groups < options.groups) {
    const std::int64_t size = choice.size(1) / options.groups;
    const at::Tensor groups = choice.unflatten(1, {options.groups, size});
    const at::Tensor best_two =
        std::get<0>(groups.topk(std::min<std::int64_t>(size, 2))).sum(-1);
    const at::Tensor is_left_out =
        at::ones_like(best_two, at::kBool)
            .scatter_(1, best_of(best_two, options.kept_groups), false);
    choice = groups.masked_fill(is_left_out.unsqueeze(2), -INFINITY).flatten(1);
  }
  return best_of(choice, options.experts_per_token).to(at::kInt);
}

// Returns the weights before they are scaled, and their normalizer.
std::tuple<at::Tensor, at::Tensor> chosen_scores(
    const at::Tensor& scores,
    const at::Tensor& experts,
    const RouterOptions& options) {
  const at::Tensor chosen = scores.gather(1, experts.to(at::kLong));
  return {chosen, chosen.sum(-1, /*keepdim=*/true) + options.epsilon};
}

at::Tensor weigh(
    const at::Tensor& scores,
    const at::Tensor& experts,
    const RouterOptions& options) {
  const auto [chosen, sum] = chosen_scores(scores, experts, options);
  return (options.normalize ? chosen / sum : chosen) * options.scale;
}

// Computes RouterBackward.
// @param loss  the gradient of the loss, or undefined: 1
at::Tensor gradient_of_logits(
    const at::Tensor& logits,
    const at::Tensor& dweights,
    const RouterState& state,
    const at::Tensor& loss,
    float aux_loss,
    float z_loss) {
  const RouterOptions& options = state.options;
  const at::Tensor& experts = state.experts;
  const at::Tensor& counts = state.load;
  const at::Tensor of_loss = loss.defined() ? loss : at::ones({});
  const auto slots = static_cast<double>(options.experts_per_token);
  at::Tensor aux;
  at::Tensor z;
  if (state.padding.defined()) {
    const at::Tensor tokens = num_counted(counts, options);
    const at::Tensor of_token =
        of_loss * state.padding.logical_not().unsqueeze(1);
    aux = of_token * (aux_loss * logits.size(1) / (tokens * tokens * slots));
    z = of_token * (z_loss * 2 / tokens);
  } else {
    const auto tokens = static_cast<double>(logits.size(0));
    aux = of_loss * (aux_loss * logits.size(1) / (tokens * tokens * slots));
    z = of_loss * (z_loss * 2 / tokens);
  }
  const at::Tensor scores = scores_of(logits, options);
  const auto [chosen, sum] = chosen_scores(scores, experts, options);
  at::Tensor dchosen = dweights;
  if (options.normalize) {
    const at::Tensor dot = (dweights * chosen).sum(-1, /*keepdim=*/true);
    dchosen = (dweights - dot / sum) / sum;
  }
  at::Tensor d = at::zeros_like(scores).scatter_(
      1,
      experts.to(at::kLong),
      dchosen * options.scale);
  const bool is_softmax = options.score == RouterScore::softmax;
  if (options.aux_loss > 0 && is_softmax) {
    d += aux * counts;
  } else if (options.aux_loss > 0) {  // the gradient of s / sum(s)
    const at::Tensor all = scores.sum(-1, /*keepdim=*/true);
    const at::Tensor dot = (scores * counts).sum(-1, /*keepdim=*/true);
    d += aux * (counts - dot / all) / all;
  }
  d = is_softmax ? at::_softmax_backward_data(d, scores, -1, at::kFloat)
                 : at::sigmoid_backward(d, scores);
  if (options.z_loss > 0) {
    d += z * logits.logsumexp(-1, /*keepdim=*/true) * at::softmax(logits, -1);
  }
  return d;
}

struct RouterFunction : torch::autograd::Function<RouterFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& logits,
      const c10::intrusive_ptr<RouterState>& state) {
    const at::Tensor rows = logits.contiguous();
    const bool chosen = state->experts.defined();
    const at::Tensor weights =
        rows.is_cuda() ? on_gpu(rows, *state) : on_cpu(rows, *state);
    if (!chosen) {
      state->counts = count_experts(
          without_padding(state->experts, state->padding, logits.size(1)),
          logits.size(1));
    }
    state->load = load_of(*state);
    ctx->saved_data["state"] = c10::IValue::make_capsule(state);
    ctx->save_for_backward({rows});
    return weights;
  }

  static at::Tensor on_cpu(const at::Tensor& logits, RouterState& state) {
    const at::Tensor scores = scores_of(logits, state.options);
    if (!state.experts.defined()) {
      state.experts = choose(scores, state.bias, state.options);
    }
    return weigh(scores, state.experts, state.options);
  }

  static at::Tensor on_gpu(const at::Tensor& logits, RouterState& state) {
    const bool chosen = state.experts.defined();
    const std::vector<std::int64_t> shape{
        logits.size(0),
        state.options.experts_per_token};
    if (!chosen) {
      state.experts = at::empty(shape, logits.options().dtype(at::kInt));
    }
    at::Tensor weights = at::empty(shape, logits.options());
    cuda::launch(
        RouterForward{
            .rule = rule_of(state.options, logits.size(1)),
            .tokens = logits.size(0),
            .logits = logits.const_data_ptr<float>(),
            .bias = cuda::data_of<float>(state.bias),
            .chosen = chosen,
            .experts = state.experts.mutable_data_ptr<std::int32_t>(),
            .weights = weights.mutable_data_ptr<float>()},
        logits.device());
    return weights;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("the router");
    const at::Tensor logits = ctx->get_saved_variables()[0];
    const auto capsule = ctx->saved_data["state"].toCapsule();
    const auto& state = static_cast<const RouterState&>(*capsule);
    const RouterOptions& options = state.options;
    at::Tensor loss =
        state.loss_gradient ? state.loss_gradient->value : at::Tensor();
    if (loss.defined()) {
      loss = loss.to(logits.device(), at::kFloat).contiguous();
    }
    const float aux = shared_coefficient(options.aux_loss, 2, state);
    const float z = shared_coefficient(options.z_loss, 1, state);
    const at::Tensor dweights = grads[0].contiguous();
    if (!logits.is_cuda()) {
      return {gradient_of_logits(logits, dweights, state, loss, aux, z), {}};
    }
    at::Tensor dlogits = at::empty_like(logits);
    cuda::launch(
        RouterBackward{
            .rule = rule_of(options, logits.size(1)),
            .tokens = logits.size(0),
            .logits = logits.const_data_ptr<float>(),
            .experts = state.experts.const_data_ptr<std::int32_t>(),
            .dweights = dweights.const_data_ptr<float>(),
            .counts = state.load.const_data_ptr<std::int32_t>(),
            .padding = cuda::data_of<bool>(state.padding),
            .loss_gradient = cuda::data_of<float>(loss),
            .aux = aux,
            .z = z,
            .dlogits = dlogits.mutable_data_ptr<float>()},
        logits.device());
    return {dlogits, {}};
  }
};

struct TellGradientFunction : torch::autograd::Function<TellGradientFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& loss,
      const LossGradientPtr& to) {
    ctx->saved_data["to"] = c10::IValue::make_capsule(to);
    return reshape_result(loss, loss.sizes());
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto capsule = ctx->saved_data["to"].toCapsule();
    static_cast<LossGradient&>(*capsule).value = grads[0].detach();
    return {grads[0], {}};
  }
};

}  // namespace

void RouterOptions::check(std::int64_t num_experts) const {
  FLATSHARD_CHECK(
      experts_per_token >= 1 && experts_per_token <= num_experts,
      config,
      "experts_per_token: expected 1 to num_experts = {}, got {}",
      num_experts,
      experts_per_token);
  FLATSHARD_CHECK(
      groups >= 1 && num_experts % groups == 0,
      config,
      "router_groups: expected a divisor of num_experts = {}, got {}",
      num_experts,
      groups);
  FLATSHARD_CHECK(
      kept_groups >= 1 && kept_groups <= groups,
      config,
      "router_kept_groups: expected 1 to router_groups = {}, got {}",
      groups,
      kept_groups);
  const std::int64_t allowed = kept_groups * (num_experts / groups);
  FLATSHARD_CHECK(
      experts_per_token <= allowed,
      config,
      "experts_per_token: expected at most the {} experts of {} of {} groups, "
      "got {}",
      allowed,
      kept_groups,
      groups,
      experts_per_token);
  FLATSHARD_CHECK(
      aux_loss >= 0 && z_loss >= 0,
      config,
      "aux_loss and z_loss: expected no less than 0, got {} and {}",
      aux_loss,
      z_loss);
}

Routing route(
    const at::Tensor& logits,
    const at::Tensor& bias,
    const RouterOptions& options,
    const RouteOptions& call) {
  FLATSHARD_CHECK(
      logits.dim() == 2 && logits.scalar_type() == at::kFloat,
      usage,
      "route: expected float32 logits [tokens, experts], got {} {}",
      c10::toString(logits.scalar_type()),
      c10::str(logits.sizes()));
  options.check(logits.size(1));
  FLATSHARD_CHECK(
      !bias.defined() || bias.sizes() == logits.sizes().slice(1),
      usage,
      "route: expected a bias of [{}], got {}",
      logits.size(1),
      c10::str(bias.sizes()));
  FLATSHARD_CHECK(
      !call.padding.defined() ||
          (call.padding.scalar_type() == at::kBool &&
           call.padding.sizes() == logits.sizes().slice(0, 1)),
      usage,
      "route: expected bool padding of [{}], got {} {}",
      logits.size(0),
      c10::toString(call.padding.scalar_type()),
      c10::str(call.padding.sizes()));
  auto state = c10::make_intrusive<RouterState>();
  state->options = options;
  state->loss_gradient = call.loss_gradient;
  if (call.padding.defined()) {
    state->padding = call.padding.contiguous();
  }
  if (bias.defined()) {
    state->bias = bias.detach().to(at::kFloat).contiguous();
  }
  if (call.chosen != nullptr) {
    state->experts = call.chosen->experts;
    state->counts = call.chosen->counts;
  }
  const at::Tensor weights = RouterFunction::apply(logits, state);
  return {
      .experts = state->experts,
      .weights = weights,
      .counts = state->counts};
}

at::Tensor tell_gradient(const at::Tensor& loss, const LossGradientPtr& to) {
  return TellGradientFunction::apply(loss, to);
}

}  // namespace flatshard::nn
