#include "flatshard/models/moe.h"

#include "flatshard/core/error.h"
#include "flatshard/models/init.h"
#include "flatshard/nn/recompute.h"
#include "flatshard/nn/region.h"
#include "flatshard/nn/swiglu.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

namespace flatshard::models {
namespace {

// DeepSeek-V3 adds it to the sum of sigmoid scores.
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
      .ranks = options.ranks};
}

// A forward that a backward is to follow.
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
  add_to(load_.kept, kept.sum(at::kLong));
}

void RouterImpl::count(const nn::Routing& routing, const at::Tensor& logits) {
  if (load_.counts.defined()) {
    load_.counts.add_(routing.counts);
  } else {
    load_.counts = routing.counts.to(at::kLong);
  }
  if (measures_balance_) {
    add_to(
        load_.balance,
        nn::load_balance(logits.detach(), routing.counts, options_));
    ++load_.measured;
  }
}

at::Tensor RouterImpl::score(const at::Tensor& x) const {
  // Sigmoid scores are compared with a bias that moves by thousandths.
  const bool wide = options_.score == nn::RouterScore::sigmoid;
  return (wide ? nn::linear(x.to(at::kFloat), weight_.to(at::kFloat))
               : nn::linear(x, weight_, {}, {}, context()))
      .to(at::kFloat);
}

nn::Routing RouterImpl::forward(
    const at::Tensor& x,
    const nn::Routing* chosen,
    const at::Tensor& scored) {
  const at::Tensor logits = scored.defined() ? scored : score(x);
  const bool counts = chosen == nullptr && backward_follows();
  if (chosen == nullptr && force_balance_) {
    chosen = &balanced_choice_for(x);
  }
  nn::Routing routing =
      nn::route(logits, bias_, options_, chosen, loss_gradient_);
  if (counts) {
    const at::NoGradGuard no_grad;
    count(routing, logits);
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

ExpertsImpl::ExpertsImpl(const ModelConfig& config, const MoeOptions& options)
    : Module("Experts"), exchange_(options.exchange) {
  const std::int64_t experts = options.local_experts > 0
                                   ? options.local_experts
                                   : config.moe.num_experts;
  const std::int64_t ffn_dim =
      options.local_ffn_dim > 0 ? options.local_ffn_dim : config.moe.ffn_dim;
  gate_up_proj_ = declare_parameter(
      "gate_up_proj",
      {experts, 2 * ffn_dim, config.dim},
      InitSpec::normal(0.0F, init_std(config)));
  down_proj_ = declare_parameter(
      "down_proj",
      {experts, config.dim, ffn_dim},
      residual_init(config));
}

bool is_expert_parameter(std::string_view name) {
  return name.ends_with(".experts.gate_up_proj") ||
         name.ends_with(".experts.down_proj");
}

at::Tensor ExpertsImpl::forward(
    const at::Tensor& x,
    const at::Tensor& weights,
    const RoutingRecord& record) {
  const nn::ExchangePlanPtr& plan = record.plan;
  const at::Tensor row_weights =
      nn::permute_weights(weights, record.permutation);
  if (!are_all_here()) {
    exchange_->finish_plan(plan);
  }
  const nn::Groups groups{plan->ends, plan->groups_per_expert};
  if (are_all_here()) {
    const at::Tensor gate_up = nn::permute_grouped_linear(
        x,
        record.permutation,
        gate_up_proj_,
        groups,
        context());
    return nn::grouped_swiglu_linear(
        gate_up,
        row_weights,
        down_proj_,
        groups,
        context());
  }
  const nn::TensorList rows =
      nn::dispatch_tokens(exchange_, plan, record.permutation, x, row_weights);
  return nn::grouped_swiglu_linear(
      nn::grouped_linear(rows[0], gate_up_proj_, groups, context()),
      rows[1],
      down_proj_,
      groups,
      context());
}

MoeImpl::MoeImpl(
    const ModelConfig& config,
    const MoeOptions& options,
    const nn::LossGradientPtr& loss_gradient)
    : Module("Moe"),
      capacity_factor_(options.capacity_factor),
      exchange_(
          options.exchange ? options.exchange
                           : std::make_shared<nn::LocalExchange>()) {
  FLATSHARD_CHECK(
      capacity_factor_ >= 0,
      config,
      "expert_capacity_factor: expected no less than 0, got {}",
      capacity_factor_);
  gate_ = register_module("gate", Router(config, options, loss_gradient));
  experts_ = register_module("experts", Experts(config, options));
  if (config.moe.shared_experts == 0) {
    return;
  }
  const std::int64_t width = config.moe.shared_experts * config.moe.ffn_dim;
  shared_ = register_module(
      "shared_experts",
      std::make_shared<nn::Module>("SharedExperts"));
  shared_gate_ = shared_->register_module(
      "gate_proj",
      nn::Linear(
          config.dim,
          width,
          plain_linear(config, false, options.ranks)));
  shared_up_ = shared_->register_module(
      "up_proj",
      nn::Linear(
          config.dim,
          width,
          plain_linear(config, false, options.ranks)));
  shared_down_ = shared_->register_module(
      "down_proj",
      nn::Linear(
          width,
          config.dim,
          residual_linear(config, false, options.ranks)));
}

void MoeImpl::plan(const nn::Routing& routing, RoutingRecord& record) {
  // Choices, counts and weights to the order of rows and the counts that stay.
  const auto sort = [factor = capacity_factor_](const nn::TensorList& in) {
    const at::NoGradGuard no_grad;
    nn::Routing kept{.experts = in[0], .weights = in[2], .counts = in[1]};
    if (factor > 0) {
      const double share = static_cast<double>(kept.experts.numel()) /
                           static_cast<double>(kept.counts.size(0));
      kept = nn::drop_beyond_capacity(
          kept,
          static_cast<std::int64_t>(std::ceil(factor * share)));
    }
    const auto sorted = nn::sort_by_expert(kept.experts, kept.counts);
    return nn::TensorList{sorted.order, sorted.inverse, kept.counts};
  };
  const nn::TensorList out = nn::region(
      *this,
      "moe_preprocess",
      sort,
      {routing.experts, routing.counts, routing.weights.detach()});
  record.permutation = {
      .order = out[0],
      .inverse = out[1],
      .drops = capacity_factor_ > 0};
  if (record.permutation.drops && backward_follows()) {
    const at::NoGradGuard no_grad;
    gate_->count_kept(out[2]);
  }
  record.plan = exchange_->begin_plan(out[2], record.permutation.rows());
  // Its weights belong to the graph of the run that made them.
  record.routing =
      nn::Routing{.experts = routing.experts, .counts = routing.counts};
}

nn::TensorList MoeImpl::run_before_choice(
    const nn::TensorList& in,
    nn::RmsNormImpl& norm,
    bool with_shared) {
  const at::Tensor delta = in.size() > 1 ? in[1] : at::Tensor();
  const auto [sum, normed] = nn::call_with_hooks(norm, in[0], delta);
  const at::Tensor rows = normed.reshape({-1, normed.size(-1)});
  const at::Tensor logits = gate_->score(rows);
  if (!shared_ || !with_shared) {
    return {rows, sum, logits};
  }
  const auto outs = nn::linears(rows, {shared_gate_.get(), shared_up_.get()});
  return {
      rows,
      nn::swiglu_linear(
          outs[0],
          outs[1],
          *shared_down_,
          sum.reshape(rows.sizes())),
      logits};
}

MoeImpl::BeforeChoice MoeImpl::before_choice(
    const at::Tensor& x,
    const at::Tensor& delta,
    nn::RmsNormImpl& norm,
    bool with_shared) {
  nn::TensorList inputs{x};
  if (delta.defined()) {
    inputs.push_back(delta);
  }
  const nn::TensorList out = nn::region(
      *this,
      "moe_router",
      [this, &norm, with_shared](const nn::TensorList& in) {
        return run_before_choice(in, norm, with_shared);
      },
      inputs);
  return {.rows = out[0], .sum = out[1], .logits = out[2]};
}

nn::Routing MoeImpl::choose(const BeforeChoice& before, RoutingRecord& record) {
  const nn::Routing routing = gate_(
      before.rows,
      record.routing ? &*record.routing : nullptr,
      before.logits);
  if (!record.routing) {
    plan(routing, record);
  }
  return routing;
}

at::Tensor MoeImpl::forward(
    const at::Tensor& x,
    const at::Tensor& delta,
    nn::RmsNormImpl* norm,
    RoutingRecord* record) {
  const BeforeChoice before =
      before_choice(x, delta, *norm, /*with_shared=*/true);
  const nn::Routing routing = choose(before, *record);
  const at::Tensor out = experts_(before.rows, routing.weights, *record);
  const at::Tensor sum =
      experts_->are_all_here()
          ? nn::sum_rows_of_tokens(out, record->permutation, before.sum)
          : nn::combine_tokens(
                exchange_,
                record->plan,
                record->permutation,
                out,
                before.sum);
  return shared_ ? sum.view(x.sizes()) : sum;
}

}  // namespace flatshard::models
