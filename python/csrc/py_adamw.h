#pragma once

#include "flatshard/core/error.h"
#include "flatshard/optim/optimizer.h"
#include "python/csrc/py_unit.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace flatshard::python {

/// An option of each parameter group of one step.
struct PyAdamWValues {
  double lr = 0;
  std::pair<double, double> betas;
  double eps = 0;
  double weight_decay = 0;
};

/// The core's AdamW over the groups of some units. It keeps the units alive.
class PyAdamW {
 public:
  /// @param group_of_parameters  the parameter group of each parameter of each
  ///   unit, in the unit's order; -1 for parameters that are not updated.
  /// @param bfloat16_states  exp_avg and exp_avg_sq are bfloat16, not float32.
  PyAdamW(
      std::vector<std::shared_ptr<PyUnit>> units,
      const std::vector<std::vector<std::int64_t>>& group_of_parameters,
      bool bfloat16_states)
      : units_(std::move(units)),
        state_dtype_(
            bfloat16_states ? StateFormat::bfloat16 : StateFormat::float32) {
    const std::vector<ParamGroup*> groups = trainable_groups_of(units_);
    ParameterGroups parameters;
    for (const ParamGroup* group : groups) {
      parameters.of_parameters.emplace_back(
          group->parameters().size(),
          ParameterGroups::kNotUpdated);
    }
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const PyUnit& unit = *units_[u];
      for (std::int64_t i = 0; i < unit.num_parameters(); ++i) {
        const std::int64_t index = group_of_parameters.at(u).at(i);
        if (index < 0 || !unit.trainable(i)) {
          continue;
        }
        const auto group = static_cast<std::size_t>(index);
        while (parameters.groups.size() <= group) {
          parameters.groups.push_back(
              {.title = std::to_string(parameters.groups.size()),
               .values = {.state_dtype = state_dtype_}});
        }
        parameters.of_parameters.at(index_of(groups, unit, i))
            .at(unit.index_in_group(i)) = group;
      }
    }
    optimizer_ = std::make_unique<Optimizer>(groups, std::move(parameters));
  }

  /// Makes one update.
  ///
  /// @param groups  the options of each parameter group.
  void step(const std::vector<PyAdamWValues>& groups) {
    const auto& own = optimizer_->parameter_groups().groups;
    for (std::size_t i = 0; i < std::min(own.size(), groups.size()); ++i) {
      optimizer_->set_values(
          i,
          {.lr_mult = groups[i].lr,
           .weight_decay = groups[i].weight_decay,
           .beta1 = groups[i].betas.first,
           .beta2 = groups[i].betas.second,
           .eps = groups[i].eps,
           .state_dtype = state_dtype_});
    }
    optimizer_->step(/*lr=*/1);
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
  static std::size_t index_of(
      const std::vector<ParamGroup*>& groups,
      const PyUnit& unit,
      std::size_t i) {
    const ParamGroup* wanted = &unit.group_at(unit.group_index(i));
    const auto found = std::find(groups.begin(), groups.end(), wanted);
    FLATSHARD_CHECK(
        found != groups.end(),
        usage,
        "this optimizer does not update that parameter");
    return found - groups.begin();
  }
  std::size_t group_of(const std::shared_ptr<PyUnit>& unit, std::size_t i)
      const {
    return index_of(optimizer_->groups(), *unit, i);
  }

  std::vector<std::shared_ptr<PyUnit>> units_;
  StateFormat state_dtype_;
  std::unique_ptr<Optimizer> optimizer_;
};

}  // namespace flatshard::python
