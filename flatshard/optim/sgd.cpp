#include "flatshard/optim/sgd.h"

#include "flatshard/core/error.h"

namespace flatshard {

Sgd::Sgd(std::vector<ParamGroup*> groups, SgdOptions options)
    : Optimizer(std::move(groups), options.weight_decay), options_(options) {
  FLATSHARD_CHECK(
      options.momentum >= 0 && options.momentum < 1,
      config,
      "expected optimizer.momentum in [0, 1), got {}",
      options.momentum);
  for (std::size_t i = 0; options.momentum > 0 && i < this->groups().size();
       ++i) {
    momentum_.push_back(new_state(i));
  }
}

std::vector<std::pair<std::string, at::Tensor>> Sgd::state(
    std::size_t group) const {
  if (momentum_.empty()) {
    return {};
  }
  return {{"momentum", momentum_.at(group)}};
}

void Sgd::update(std::size_t group, FlatUpdate& update, double lr) {
  if (!momentum_.empty()) {
    update.state0 = momentum_[group];
  }
  sgd_update(
      update,
      {.lr = static_cast<float>(lr),
       .momentum = static_cast<float>(options_.momentum),
       .first = group_steps(group) == 1});
}

}  // namespace flatshard
