#include "flatshard/models/moe.h"

#include "flatshard/core/error.h"
#include "flatshard/models/init.h"
#include "flatshard/nn/region.h"
#include "flatshard/nn/second_run.h"
#include "flatshard/nn/swiglu.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard::models {

ExpertsImpl::ExpertsImpl(const ModelConfig& config, const MoeOptions& options)
    : Module("Experts"),
      are_all_here_(options.exchange == nullptr),
      activation_(config.block.activation),
      layout_(config.block.expert_layout) {
  FLATSHARD_CHECK(
      !config.block.mlp_bias || options.local_ffn_dim == 0 ||
          options.local_ffn_dim == config.moe.ffn_dim,
      config,
      "parallelism.expert_tensor_parallel_degree: expected 1 for experts with "
      "biases, as the family {} has, found parts of a width of {}; use "
      "parallelism.expert_parallel_degree",
      config.family,
      options.local_ffn_dim);
  const std::int64_t experts = options.local_experts > 0
                                   ? options.local_experts
                                   : config.moe.num_experts;
  const std::int64_t ffn_dim =
      options.local_ffn_dim > 0 ? options.local_ffn_dim : config.moe.ffn_dim;
  const auto shape = [&](std::int64_t out, std::int64_t in) {
    return layout_ == nn::ExpertLayout::stacked
               ? std::vector<std::int64_t>{experts, out, in}
               : std::vector<std::int64_t>{experts, in, out};
  };
  gate_up_proj_ = declare_parameter(
      "gate_up_proj",
      shape(2 * ffn_dim, config.dim),
      InitSpec::normal(0.0F, init_std(config)));
  down_proj_ = declare_parameter(
      "down_proj",
      shape(config.dim, ffn_dim),
      residual_init(config));
  if (config.block.mlp_bias) {
    gate_up_proj_bias_ = declare_parameter(
        "gate_up_proj_bias",
        {experts, 2 * ffn_dim},
        InitSpec::zeros());
    down_proj_bias_ = declare_parameter(
        "down_proj_bias",
        {experts, config.dim},
        InitSpec::zeros());
  }
}

bool is_expert_parameter(std::string_view name) {
  constexpr std::string_view kEnds[] = {
      ".experts.gate_up_proj",
      ".experts.down_proj",
      ".experts.gate_up_proj_bias",
      ".experts.down_proj_bias"};
  return std::ranges::any_of(kEnds, [&](std::string_view end) {
    return name.ends_with(end);
  });
}

at::Tensor ExpertsImpl::forward(
    const at::Tensor& x,
    const at::Tensor& weights,
    const RoutingRecord& record,
    bool is_unread) {
  set_result_unread(is_unread);
  const nn::Groups groups{record.plan->ends, record.plan->groups_per_expert};
  const nn::GroupedLayer gate_up{gate_up_proj_, gate_up_proj_bias_, layout_};
  return nn::grouped_gated_linear(
      activation_,
      are_all_here_ ? nn::permute_grouped_linear(
                          x,
                          record.permutation,
                          gate_up,
                          groups,
                          context())
                    : nn::grouped_linear(x, gate_up, groups, context()),
      weights,
      {down_proj_, down_proj_bias_, layout_},
      groups,
      context(),
      is_unread);
}

MoeImpl::MoeImpl(
    const ModelConfig& config,
    const MoeOptions& options,
    const nn::LossGradientPtr& loss_gradient)
    : Module("Moe"),
      capacity_factor_(options.capacity_factor),
      ranks_(options.ranks),
      token_ranks_(options.context),
      exchange_(options.exchange) {
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
  const auto into = plain_linear(config, false, options.ranks);
  const auto add = [&](const char* name, const nn::Linear& layer) {
    return shared_->register_module(name, layer);
  };
  shared_gate_ = add("gate_proj", nn::Linear(config.dim, width, into));
  shared_up_ = add("up_proj", nn::Linear(config.dim, width, into));
  shared_down_ =
      add("down_proj",
          nn::Linear(
              width,
              config.dim,
              residual_linear(config, false, options.ranks)));
}

std::shared_ptr<RoutingRecord> MoeImpl::new_record(
    const nn::Documents& documents) const {
  auto record = std::make_shared<RoutingRecord>();
  if (documents.padding.defined()) {
    const at::Tensor padding = nn::own_rows(token_ranks_, documents.padding);
    record->padding = nn::own_tokens(ranks_, padding.unsqueeze(1)).squeeze(1);
  }
  return record;
}

void MoeImpl::plan(const nn::Routing& routing, RoutingRecord& record) {
  // Choices, counts and weights to the order of rows and the counts that stay.
  const auto sort = [factor = capacity_factor_](const nn::TensorList& in) {
    const at::NoGradGuard no_grad;
    nn::Routing kept{.experts = in[0], .weights = in[2], .counts = in[1]};
    const bool has_padding = in.size() > 3;
    if (has_padding) {
      kept = nn::drop_padding(kept, in[3]);
    }
    if (factor > 0) {
      kept = nn::drop_beyond_capacity(kept, factor, has_padding);
    }
    const auto sorted = nn::sort_by_expert(kept.experts, kept.counts);
    return nn::TensorList{sorted.order, sorted.inverse, kept.counts};
  };
  nn::TensorList inputs{
      routing.experts,
      routing.counts,
      routing.weights.detach()};
  if (record.padding.defined()) {
    inputs.push_back(record.padding);
  }
  const nn::TensorList out = nn::region(*this, "moe_preprocess", sort, inputs);
  record.permutation = {
      .order = out[0],
      .inverse = out[1],
      .drops = capacity_factor_ > 0 || record.padding.defined()};
  if (capacity_factor_ > 0) {
    gate_->count_kept(out[2]);
  }
  const std::int64_t num_rows = record.permutation.rows();
  record.plan = exchange_ ? exchange_->begin_plan(out[2], num_rows)
                          : nn::LocalExchange().plan(out[2], num_rows);
  // Its weights belong to the graph of the run that made them.
  record.routing =
      nn::Routing{.experts = routing.experts, .counts = routing.counts};
}

nn::TensorList MoeImpl::score(
    const at::Tensor& x,
    const at::Tensor& delta,
    nn::RmsNormImpl& norm) {
  nn::TensorList inputs{x};
  if (delta.defined()) {
    inputs.push_back(delta);
  }
  return nn::region(
      *this,
      "moe_router",
      [this, &norm](const nn::TensorList& in) {
        const auto [sum, normed] = nn::call_with_hooks(
            norm,
            in[0],
            in.size() > 1 ? in[1] : at::Tensor());
        const at::Tensor rows = normed.reshape({-1, normed.size(-1)});
        return nn::TensorList{rows, sum, gate_->score(rows)};
      },
      inputs);
}

nn::TensorList MoeImpl::run_shared(
    const nn::TensorList& in,
    bool is_result_of_part) {
  return nn::region(
      *shared_,
      "moe_router",
      [this, is_result_of_part](const nn::TensorList& in) {
        const at::Tensor& rows = in[0];
        const at::Tensor& sum = in[1];
        const auto outs =
            nn::linears(rows, {shared_gate_.get(), shared_up_.get()});
        const at::Tensor all = nn::swiglu_linear(
            outs[0],
            outs[1],
            *shared_down_,
            sum.reshape(rows.sizes()),
            is_result_of_part && nn::in_second_run());
        return nn::TensorList{all.view(sum.sizes())};
      },
      in);
}

void MoeImpl::append_nodes(
    nn::Nodes& nodes,
    const std::vector<int>& in,
    nn::RmsNormImpl* norm,
    RoutingRecord* record,
    bool is_result_of_part) {
  const auto is_unread = [is_result_of_part] {
    return is_result_of_part && nn::in_second_run();
  };
  const std::vector<int> routed = nodes.add(
      "moe_router",
      in,
      4,
      {norm, gate_.get()},
      [this, norm, record](const nn::TensorList& in) {
        const nn::TensorList scored = score(in[0], in[1], *norm);
        const at::Tensor& rows = scored[0];
        // The first run of a call chooses, and fills the record.
        const nn::Routing routing = gate_(
            rows,
            record->routing ? &*record->routing : nullptr,
            scored[2],
            record->padding);
        if (!record->routing) {
          plan(routing, *record);
        }
        return nn::TensorList{
            scored[1],
            rows,
            // A separate reader, so that its gradient arrives separately.
            rows.view(rows.sizes()),
            nn::permute_weights(routing.weights, record->permutation)};
      });
  const int rows = routed[2];
  const int weights = routed[3];
  int sum = routed[0];
  if (shared_) {
    sum = nodes.add(
        "shared_experts",
        {routed[1], sum},
        1,
        {shared_.get()},
        [this, is_result_of_part](const nn::TensorList& in) {
          return run_shared(in, is_result_of_part);
        })[0];
  }
  const auto run_experts = [this, record, is_unread](const nn::TensorList& in) {
    return nn::TensorList{experts_(in[0], in[1], *record, is_unread())};
  };
  if (!exchange_) {
    const auto out =
        nodes.add("experts", {rows, weights}, 1, {experts_.get()}, run_experts);
    const auto merge = [record, is_unread](const nn::TensorList& in) {
      return nn::TensorList{nn::sum_rows_of_tokens(
          in[0],
          record->permutation,
          in[1],
          is_unread())};
    };
    nodes.add("merge", {out[0], sum}, 1, {}, merge);
    return;
  }
  const auto route = [this, record](nn::TokenExchange::Direction direction) {
    return [this, record, direction] {
      return nn::RowRoute{
          .exchange = exchange_,
          .plan = record->plan,
          .direction = direction,
          .tokens = record->permutation};
    };
  };
  const auto arrived = nodes.exchange(
      "dispatch",
      {rows, weights},
      route(nn::TokenExchange::Direction::dispatch));
  const auto out =
      nodes.add("experts", arrived, 1, {experts_.get()}, run_experts);
  nodes.exchange(
      "combine",
      out,
      route(nn::TokenExchange::Direction::combine),
      /*addend=*/sum,
      is_result_of_part);
}

at::Tensor MoeImpl::forward(
    const at::Tensor& x,
    const at::Tensor& delta,
    nn::RmsNormImpl* norm,
    RoutingRecord* record,
    bool is_result_of_part) {
  set_result_unread(is_result_of_part && nn::in_second_run());
  nn::Nodes nodes(2);
  append_nodes(nodes, {0, 1}, norm, record, is_result_of_part);
  return nodes.run({x, delta})[0];
}

}  // namespace flatshard::models
