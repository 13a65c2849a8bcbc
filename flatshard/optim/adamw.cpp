#include "flatshard/optim/adamw.h"

#include <ATen/ATen.h>

#include <cmath>

namespace flatshard {

void AdamWAlgorithm::add_group(
    std::size_t group,
    const at::Tensor& main,
    std::span<const ParameterValues> /*values*/) {
  const auto options = main.options().dtype(at::kFloat);
  states_[group] = {
      .exp_avg = at::zeros({main.numel()}, options),
      .exp_avg_sq = at::zeros({main.numel()}, options)};
}

std::vector<std::pair<std::string, at::Tensor>> AdamWAlgorithm::state(
    std::size_t group) const {
  const States& states = states_.at(group);
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

void AdamWAlgorithm::update(std::size_t group, FlatUpdate& update) const {
  const States& states = states_.at(group);
  update.state0 = states.exp_avg;
  update.state1 = states.exp_avg_sq;
  adamw_update(update);
}

AdamW::AdamW(std::vector<ParamGroup*> groups, AdamWOptions options)
    : Optimizer(
          std::move(groups),
          ParameterRules{
              .rest = {
                  .algorithm = Algorithm::adamw,
                  .weight_decay = options.weight_decay,
                  .beta1 = options.beta1,
                  .beta2 = options.beta2,
                  .eps = options.eps}}) {
}

}  // namespace flatshard
