#pragma once

#include "flatshard/core/error.h"
#include "flatshard/optim/moments.h"
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
  /// @param state_dtypes  of exp_avg and exp_avg_sq, for each parameter group.
  PyAdamW(
      std::vector<std::shared_ptr<PyUnit>> units,
      const std::vector<std::vector<std::int64_t>>& group_of_parameters,
      const std::vector<at::ScalarType>& state_dtypes)
      : units_(std::move(units)) {
    const std::vector<ParamGroup*> groups = trainable_groups_of(units_);
    ParameterGroups parameters;
    for (const ParamGroup* group : groups) {
      parameters.of_parameters.emplace_back(
          group->parameters().size(),
          ParameterGroups::kNotUpdated);
    }
    for (const at::ScalarType dtype : state_dtypes) {
      parameters.groups.push_back(
          {.title = std::to_string(parameters.groups.size()),
           .values = {.state_dtype = format_of(dtype)}});
    }
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const PyUnit& unit = *units_[u];
      for (std::int64_t i = 0; i < unit.num_parameters(); ++i) {
        const std::int64_t index = group_of_parameters.at(u).at(i);
        if (index < 0 || !unit.trainable(i)) {
          continue;
        }
        const auto group = static_cast<std::size_t>(index);
        parameters.of_parameters.at(index_of(groups, unit, i))
            .at(unit.index_in_group(i)) = group;
        const GroupParameter& p = unit.group_at(unit.group_index(i))
                                      .parameters()
                                      .at(unit.index_in_group(i));
        const StateFormat asked =
            parameters.groups.at(group).values.state_dtype;
        if (state_format_of(p, asked) == StateFormat::int8) {
          unit.check_int8_states();
        }
      }
    }
    optimizer_ = std::make_unique<Optimizer>(groups, std::move(parameters));
    for (std::size_t g = 0; g < groups.size(); ++g) {
      states_.push_back(states_of(*optimizer_, g));
    }
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
           .state_dtype = own[i].values.state_dtype});
    }
    optimizer_->step(/*lr=*/1);
  }

  /// Rounds new values of bfloat16 parameters stochastically. The names of
  /// parameters determine the random numbers.
  void set_stochastic_rounding(std::uint64_t seed) {
    optimizer_->set_stochastic_rounding(seed);
  }

  /// exp_avg and exp_avg_sq of parameter i of a unit, like its shard. int8
  /// states are their codes.
  std::map<std::string, at::Tensor> state(
      const std::shared_ptr<PyUnit>& unit,
      std::size_t i) const {
    std::map<std::string, at::Tensor> state;
    for (const auto& [name, shard] : shards_of(unit, i)) {
      if (!name.ends_with(kScaleSuffix)) {
        state[name] = unit->rows_at(i, shard, 0);
      }
    }
    return state;
  }
  /// Returns the values of int8 states, like the parameter's shard; otherwise
  /// nothing.
  std::map<std::string, at::Tensor> decoded(
      const std::shared_ptr<PyUnit>& unit,
      std::size_t i) const {
    std::map<std::string, at::Tensor> values;
    const States& shards = shards_of(unit, i);
    for (const auto& [name, shard] : shards) {
      const auto scales = shards.find(name + std::string(kScaleSuffix));
      if (scales != shards.end()) {
        values[name] =
            unit->rows_at(i, decode_states(shard, scales->second), 0);
      }
    }
    return values;
  }
  /// Writes values to int8 states.
  /// @param values  of the rows of this rank, as the core stores them.
  void encode(
      const std::shared_ptr<PyUnit>& unit,
      std::size_t i,
      const std::string& name,
      const at::Tensor& values) {
    const States& shards = shards_of(unit, i);
    encode_states(
        values.reshape({-1}),
        shards.at(name),
        shards.at(name + std::string(kScaleSuffix)));
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

  static StateFormat format_of(at::ScalarType dtype) {
    switch (dtype) {
      case at::kFloat:
        return StateFormat::float32;
      case at::kBFloat16:
        return StateFormat::bfloat16;
      case at::kChar:
        return StateFormat::int8;
      default:
        FLATSHARD_THROW(
            config,
            "state_dtype: expected torch.float32, torch.bfloat16, or "
            "torch.int8, got {}",
            c10::toString(dtype));
    }
  }
  using States = std::map<std::string, at::Tensor>;

  /// Returns this rank's states of parameter i of a unit, and their scales. A
  /// rank without rows of it has empty ones of the same dtypes.
  const States& shards_of(const std::shared_ptr<PyUnit>& unit, std::size_t i)
      const {
    return states_.at(group_of(unit, i)).at(unit->index_in_group(i));
  }
  /// Returns the states of each parameter of a group. Split between rows, each
  /// is one piece on a rank.
  static std::vector<States> states_of(
      const Optimizer& optimizer,
      std::size_t group) {
    std::map<std::string, std::size_t> index;
    for (const GroupParameter& p : optimizer.groups()[group]->parameters()) {
      index.emplace(p.names.front(), index.size());
    }
    std::vector<States> states(index.size());
    for (const auto& [name, shards] : optimizer.state_shards(group)) {
      for (const NamedShard& shard : shards) {
        states.at(index.at(shard.name()))[name] = shard.tensor;
      }
    }
    return states;
  }

  std::vector<std::shared_ptr<PyUnit>> units_;
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<std::vector<States>> states_;  ///< of each parameter of a group
};

}  // namespace flatshard::python
