#include "flatshard/models/router_module.h"

#include "flatshard/models/init.h"
#include "flatshard/moe/permute.h"
#include "flatshard/nn/linear.h"
#include "flatshard/nn/recompute.h"

#include <ATen/ATen.h>

#include <utility>

namespace flatshard::models {
namespace {

// DeepSeek-V3 adds this value to the sum of sigmoid scores.
constexpr double kSigmoidEpsilon = 1e-20;

nn::RouterOptions router_options(
    const MoeConfig& moe,
    const MoeOptions& options) {
  return {
      .experts_per_token = moe.experts_per_token,
      .score = moe.router_score,
      .normalize = moe.router_normalize,
      .epsilon =
          moe.router_score == nn::RouterScore::sigmoid ? kSigmoidEpsilon : 0.0,
      .scale = moe.router_scale,
      .groups = moe.router_groups,
      .kept_groups = moe.router_kept_groups,
      .aux_loss = options.aux_loss,
      .z_loss = options.z_loss,
      .ranks = options.ranks,
      .context = options.context};
}

// Returns whether a backward follows the forward.
bool backward_follows() {
  return at::GradMode::is_enabled() || nn::in_checkpointed_forward();
}

// sum += value, or value itself.
void add_to(at::Tensor& sum, const at::Tensor& value) {
  sum = sum.defined() ? sum.add_(value) : value;
}

}  // namespace

RouterImpl::RouterImpl(
    const ModelConfig& config,
    const MoeOptions& options,
    nn::LossGradientPtr loss_gradient)
    : Module("Router"),
      num_experts_(config.moe.num_experts),
      has_bias_(config.moe.router_bias),
      force_balance_(options.force_balance),
      options_(router_options(config.moe, options)),
      loss_gradient_(std::move(loss_gradient)) {
  weight_ = declare_parameter(
      "weight",
      {num_experts_, config.dim},
      InitSpec::normal(0.0F, init_std(config)));
  if (config.block.mlp_bias) {
    linear_bias_ = declare_parameter("bias", {num_experts_}, InitSpec::zeros());
  }
}

void RouterImpl::make_bias(at::Device device) {
  if (has_bias_) {
    bias_ = at::zeros(
        {num_experts_},
        at::TensorOptions().dtype(at::kFloat).device(device));
  }
}

void RouterImpl::update_bias(const at::Tensor& counts, double rate) {
  const at::NoGradGuard no_grad;
  const at::Tensor load = counts.to(at::kDouble);
  bias_.add_((load.mean() - load).sign().to(at::kFloat), rate);
}

RouterLoad RouterImpl::take_load() {
  return std::exchange(load_, {});
}

void RouterImpl::count_kept(const at::Tensor& kept) {
  if (backward_follows()) {
    const at::NoGradGuard no_grad;
    add_to(load_.kept, kept.sum(at::kLong));
  }
}

void RouterImpl::count(
    const nn::Routing& routing,
    const at::Tensor& logits,
    const at::Tensor& padding) {
  if (load_.counts.defined()) {
    load_.counts.add_(routing.counts);
  } else {
    load_.counts = routing.counts.to(at::kLong);
  }
  if (measures_balance_) {
    add_to(
        load_.balance,
        nn::load_balance(logits.detach(), routing.counts, options_, padding));
    ++load_.measured;
  }
}

at::Tensor RouterImpl::score(const at::Tensor& x) const {
  // Sigmoid scores are compared with a bias that moves by thousandths.
  const bool wide = options_.score == nn::RouterScore::sigmoid;
  const auto widened = [](const at::Tensor& t) {
    return t.defined() ? t.to(at::kFloat) : t;
  };
  return (wide ? nn::linear(widened(x), widened(weight_), widened(linear_bias_))
               : nn::linear(x, weight_, linear_bias_, {}, context()))
      .to(at::kFloat);
}

nn::Routing RouterImpl::forward(
    const at::Tensor& x,
    const nn::Routing* chosen,
    const at::Tensor& scored,
    const at::Tensor& padding) {
  const at::Tensor logits = scored.defined() ? scored : score(x);
  const bool counts = chosen == nullptr && backward_follows();
  nn::Routing balanced;
  if (chosen == nullptr && force_balance_) {
    balanced = balanced_choice_for(x);
    if (padding.defined()) {
      balanced.counts = nn::count_experts(
          nn::drop_padding(balanced, padding).experts,
          num_experts_);
    }
    chosen = &balanced;
  }
  nn::Routing routing = nn::route(
      logits,
      bias_,
      options_,
      {.chosen = chosen, .loss_gradient = loss_gradient_, .padding = padding});
  if (counts) {
    const at::NoGradGuard no_grad;
    count(routing, logits, padding);
  }
  return routing;
}

const nn::Routing& RouterImpl::balanced_choice_for(const at::Tensor& x) {
  if (!balanced_ || balanced_->experts.size(0) != x.size(0) ||
      balanced_->experts.device() != x.device()) {
    // A graph of a later forward may save it.
    const c10::InferenceMode normal(false);
    balanced_ = nn::balanced_choice(
        x.size(0),
        num_experts_,
        options_.experts_per_token,
        x.device());
  }
  return *balanced_;
}

}  // namespace flatshard::models
