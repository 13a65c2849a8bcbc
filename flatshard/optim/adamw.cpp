#include "flatshard/optim/adamw.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace flatshard {
namespace {

bool all_float32(std::span<const ParameterValues> values) {
  return std::ranges::all_of(values, [](const ParameterValues& its) {
    return its.state_dtype == StateFormat::float32;
  });
}

}  // namespace

void AdamWAlgorithm::add_group(
    std::size_t group,
    const at::Tensor& main,
    std::span<const ParameterValues> values) {
  if (!all_float32(values)) {
    states_[group] = {};
    return;  // add_parameters allocates them
  }
  const auto options = main.options().dtype(at::kFloat);
  states_[group] = {
      .exp_avg = at::zeros({main.numel()}, options),
      .exp_avg_sq = at::zeros({main.numel()}, options)};
}

void AdamWAlgorithm::add_parameters(
    std::size_t group,
    const ParamGroup& of,
    const std::vector<std::size_t>& parameters,
    std::span<const ParameterValues> values) {
  if (all_float32(values)) {
    return;
  }
  FLATSHARD_CHECK(
      parameters.size() == of.parameters().size(),
      config,
      "optimizer.state_dtype: expected AdamW for all {} parameters of {}, got "
      "{}; with another algorithm for the others, use float32",
      of.parameters().size(),
      of.name(),
      parameters.size());
  std::vector<StateFormat> formats;
  for (const ParameterValues& its : values) {
    formats.push_back(its.state_dtype);
  }
  states_.at(group).moments.emplace(of, formats);
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

void AdamWAlgorithm::update(std::size_t group, FlatUpdate& update) {
  const States& states = states_.at(group);
  if (states.moments) {
    states.moments->set_on(update);
    flat_update(Algorithm::adamw, update);
    return;
  }
  update.state0 = states.exp_avg;
  update.state1 = states.exp_avg_sq;
  flat_update(Algorithm::adamw, update);
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
                  .eps = options.eps,
                  .state_dtype = options.state_dtype}}) {
}

}  // namespace flatshard
