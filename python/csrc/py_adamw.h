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

/// The core's AdamW over the groups of some units, which it keeps alive.
class PyAdamW {
 public:
  PyAdamW(
      std::vector<std::shared_ptr<PyUnit>> units,
      double beta1,
      double beta2,
      double eps,
      double weight_decay)
      : units_(std::move(units)) {
    optimizer_ = std::make_unique<AdamW>(
        trainable_groups_of(units_),
        AdamWOptions{
            .beta1 = beta1,
            .beta2 = beta2,
            .eps = eps,
            .weight_decay = weight_decay});
  }

  void step(double lr) { optimizer_->step(lr); }

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
