#include "flatshard/optim/adamw.h"

#include "flatshard/core/error.h"

#include <cmath>

namespace flatshard {

AdamW::AdamW(std::vector<ParamGroup*> groups, AdamWOptions options)
    : Optimizer(std::move(groups), options.weight_decay), options_(options) {
  FLATSHARD_CHECK(
      options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 &&
          options.beta2 < 1,
      config,
      "expected optimizer.beta1 and optimizer.beta2 in [0, 1), got {} and {}",
      options.beta1,
      options.beta2);
  FLATSHARD_CHECK(
      options.eps > 0,
      config,
      "expected optimizer.eps > 0, got {}",
      options.eps);
  for (std::size_t i = 0; i < this->groups().size(); ++i) {
    exp_avg_.push_back(new_state(i));
    exp_avg_sq_.push_back(new_state(i));
  }
}

std::vector<std::pair<std::string, at::Tensor>> AdamW::state(
    std::size_t group) const {
  return {
      {"exp_avg", exp_avg_.at(group)},
      {"exp_avg_sq", exp_avg_sq_.at(group)}};
}

void AdamW::update(std::size_t group, FlatUpdate& update, double lr) {
  update.state0 = exp_avg_[group];
  update.state1 = exp_avg_sq_[group];
  const auto t = static_cast<double>(group_steps(group));
  adamw_update(
      update,
      {.lr = static_cast<float>(lr),
       .beta1 = static_cast<float>(options_.beta1),
       .beta2 = static_cast<float>(options_.beta2),
       .eps = static_cast<float>(options_.eps),
       .bias_correction1 =
           static_cast<float>(1.0 - std::pow(options_.beta1, t)),
       .bias_correction2 =
           static_cast<float>(1.0 - std::pow(options_.beta2, t))});
}

}  // namespace flatshard
