#include "flatshard/optim/adamw.h"

#include "flatshard/core/error.h"

#include <cmath>

namespace flatshard {

AdamW::AdamW(std::vector<ParamGroup*> groups, AdamWOptions options)
    : Optimizer(std::move(groups), options.weight_decay) {
  set_coefficients(options.beta1, options.beta2, options.eps);
  for (std::size_t i = 0; i < this->groups().size(); ++i) {
    exp_avg_.push_back(new_state(i));
    exp_avg_sq_.push_back(new_state(i));
  }
}

void AdamW::set_coefficients(double beta1, double beta2, double eps) {
  FLATSHARD_CHECK(
      beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1,
      config,
      "expected optimizer.beta1 and optimizer.beta2 in [0, 1), got {} and {}",
      beta1,
      beta2);
  FLATSHARD_CHECK(eps > 0, config, "expected optimizer.eps > 0, got {}", eps);
  if (beta1 == beta1_ && beta2 == beta2_ && eps == eps_) {
    return;
  }
  wait();  // the last step may still read them
  beta1_ = beta1;
  beta2_ = beta2;
  eps_ = eps;
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
       .beta1 = static_cast<float>(beta1_),
       .beta2 = static_cast<float>(beta2_),
       .eps = static_cast<float>(eps_),
       .bias_correction1 = static_cast<float>(1.0 - std::pow(beta1_, t)),
       .bias_correction2 = static_cast<float>(1.0 - std::pow(beta2_, t))});
}

}  // namespace flatshard
