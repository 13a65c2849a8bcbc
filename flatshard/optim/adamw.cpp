#include "flatshard/optim/adamw.h"

#include <ATen/ATen.h>

#include <cmath>

namespace flatshard {

void AdamWAlgorithm::add_group(
    std::size_t group,
    const at::Tensor& main,
    std::span<const ParameterValues> /*values*/) {
  // add_parameters allocates them.
  states_[group] = {
      .numel = main.numel(),
      .options = main.options().dtype(at::kFloat).device(state_device())};
}

void AdamWAlgorithm::add_parameters(
    std::size_t group,
    const ParamGroup& of,
    const std::vector<OwnParameter>& parameters,
    std::span<const ParameterValues> values) {
  States& states = states_.at(group);
  std::vector<StateFormat> asked;
  bool all_float32 = true;
  for (const OwnParameter& own : parameters) {
    const GroupParameter& parameter = of.parameters().at(own.index);
    asked.push_back(values[own.row].state_dtype);
    all_float32 = all_float32 && state_format_of(parameter, asked.back()) ==
                                     StateFormat::float32;
  }
  if (all_float32) {
    states.exp_avg = at::zeros({states.numel}, states.options);
    states.exp_avg_sq = at::zeros({states.numel}, states.options);
    return;
  }
  states.moments.emplace(of, asked, state_device());
}

std::vector<std::pair<std::string, std::vector<NamedShard>>>
AdamWAlgorithm::state_shards(std::size_t group) const {
  const States& states = states_.at(group);
  return states.moments
             ? states.moments->shards()
             : std::vector<std::pair<std::string, std::vector<NamedShard>>>();
}

bool AdamWAlgorithm::encodes_planes(std::size_t group) const {
  return !states_.at(group).moments;
}

std::vector<std::pair<std::string, at::Tensor>> AdamWAlgorithm::state(
    std::size_t group) const {
  const States& states = states_.at(group);
  if (states.moments) {
    return states.moments->tensors();
  }
  return {{"exp_avg", states.exp_avg}, {"exp_avg_sq", states.exp_avg_sq}};
}

UpdateRow AdamWAlgorithm::row(
    const ParameterValues& values,
    double lr,
    std::int64_t updates) const {
  const auto t = static_cast<double>(updates);
  return AdamWStep{
      .lr = static_cast<float>(lr),
      .weight_decay = static_cast<float>(values.weight_decay),
      .beta1 = static_cast<float>(values.beta1),
      .beta2 = static_cast<float>(values.beta2),
      .eps = static_cast<float>(values.eps),
      .bias_correction1 = static_cast<float>(1.0 - std::pow(values.beta1, t)),
      .bias_correction2 = static_cast<float>(1.0 - std::pow(values.beta2, t))}
      .row();
}

void AdamWAlgorithm::visit_states(
    std::size_t group,
    const std::function<void(at::Tensor&)>& visit) {
  States& states = states_.at(group);
  if (states.moments) {
    states.moments->visit(visit);
    return;
  }
  visit(states.exp_avg);
  visit(states.exp_avg_sq);
}

void AdamWAlgorithm::set_states(std::size_t group, FlatUpdate& update) const {
  const States& states = states_.at(group);
  if (states.moments) {
    states.moments->set_on(update);
    return;
  }
  update.state0 = states.exp_avg;
  update.state1 = states.exp_avg_sq;
}

void AdamWAlgorithm::update(std::size_t /*group*/, FlatUpdate& update) {
  flat_update(Algorithm::adamw, update);
}

AdamW::AdamW(std::vector<ParamGroup*> groups, AdamWOptions options)
    : Optimizer(
          std::move(groups),
          ParameterRules{
              .rest =
                  {.algorithm = Algorithm::adamw,
                   .weight_decay = options.weight_decay,
                   .beta1 = options.beta1,
                   .beta2 = options.beta2,
                   .eps = options.eps,
                   .state_dtype = options.state_dtype}},
          options.offload) {
}

}  // namespace flatshard
