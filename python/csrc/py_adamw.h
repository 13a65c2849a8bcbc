#pragma once

#include "flatshard/core/error.h"
#include "flatshard/optim/adamw.h"
#include "python/csrc/py_unit.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace flatshard::python {

/// The core's AdamW over the groups of some units. It keeps the units alive.
class PyAdamW {
 public:
  explicit PyAdamW(std::vector<std::shared_ptr<PyUnit>> units)
      : units_(std::move(units)) {
    optimizer_ = std::make_unique<AdamW>(
        trainable_groups_of(units_),
        AdamWOptions{.weight_decay = 0});
  }

  /// Sets the weight decay of each parameter of a unit, in the unit's order;
  /// not looked at for frozen ones.
  void set_weight_decay(
      const std::shared_ptr<PyUnit>& unit,
      const std::vector<double>& of_parameters) {
    std::map<std::size_t, std::vector<double>> decays;
    for (std::int64_t i = 0; i < unit->num_parameters(); ++i) {
      if (!unit->trainable(i)) {
        continue;
      }
      std::vector<double>& of_group = decays[group_of(unit, i)];
      of_group.resize(unit->group_at(unit->group_index(i)).parameters().size());
      of_group.at(unit->index_in_group(i)) = of_parameters.at(i);
    }
    for (const auto& [group, of_group] : decays) {
      optimizer_->set_weight_decay(group, of_group);
    }
  }

  void step(double lr, std::pair<double, double> betas, double eps) {
    optimizer_->set_coefficients(betas.first, betas.second, eps);
    optimizer_->step(lr);
  }

  /// exp_avg and exp_avg_sq of parameter i of a unit, like its shard.
  std::map<std::string, at::Tensor> state(
      const std::shared_ptr<PyUnit>& unit,
      std::size_t i) const {
    std::map<std::string, at::Tensor> state;
    for (const auto& [name, flat] : optimizer_->state(group_of(unit, i))) {
      state[name] = unit->rows_of(i, flat);
    }
    return state;
  }
  std::int64_t num_updates(const std::shared_ptr<PyUnit>& unit, std::size_t i)
      const {
    return optimizer_->num_updates(group_of(unit, i));
  }
  void set_num_updates(
      const std::shared_ptr<PyUnit>& unit,
      std::size_t i,
      std::int64_t updates) {
    optimizer_->set_num_updates(group_of(unit, i), updates);
    optimizer_->set_num_steps(std::max(updates, optimizer_->num_steps()));
  }

  Optimizer& optimizer() { return *optimizer_; }

 private:
  std::size_t group_of(const std::shared_ptr<PyUnit>& unit, std::size_t i)
      const {
    const ParamGroup* wanted = &unit->group_at(unit->group_index(i));
    const auto& groups = optimizer_->groups();
    const auto found = std::find(groups.begin(), groups.end(), wanted);
    FLATSHARD_CHECK(
        found != groups.end(),
        usage,
        "this optimizer does not update that parameter");
    return found - groups.begin();
  }

  std::vector<std::shared_ptr<PyUnit>> units_;
  std::unique_ptr<AdamW> optimizer_;
};

}  // namespace flatshard::python
