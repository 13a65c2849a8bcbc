#include "flatshard/optim/sgd.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace flatshard {

void SgdAlgorithm::add_group(
    std::size_t group,
    const at::Tensor& main,
    std::span<const ParameterValues> values) {
  const bool has_momentum =
      std::any_of(values.begin(), values.end(), [](const ParameterValues& v) {
        return v.momentum > 0;
      });
  if (has_momentum) {
    momentum_[group] =
        at::zeros({main.numel()}, main.options().dtype(at::kFloat));
  }
}

std::vector<std::pair<std::string, at::Tensor>> SgdAlgorithm::state(
    std::size_t group) const {
  const auto found = momentum_.find(group);
  if (found == momentum_.end()) {
    return {};
  }
  return {{"momentum", found->second}};
}

UpdateRow SgdAlgorithm::row(
    const ParameterValues& values,
    double lr,
    std::int64_t updates) const {
  return SgdStep{
      .lr = static_cast<float>(lr),
      .weight_decay = static_cast<float>(values.weight_decay),
      .momentum = static_cast<float>(values.momentum),
      .first = updates == 1}
      .row();
}

void SgdAlgorithm::update(std::size_t group, FlatUpdate& update) {
  const auto found = momentum_.find(group);
  update.state0 = found == momentum_.end() ? at::Tensor() : found->second;
  sgd_update(update);
}

Sgd::Sgd(std::vector<ParamGroup*> groups, SgdOptions options)
    : Optimizer(
          std::move(groups),
          ParameterRules{
              .rest = {
                  .algorithm = Algorithm::sgd,
                  .weight_decay = options.weight_decay,
                  .momentum = options.momentum}}) {
}

}  // namespace flatshard
