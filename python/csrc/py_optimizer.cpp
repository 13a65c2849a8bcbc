#include "python/csrc/py_optimizer.h"

#include "flatshard/core/error.h"
#include "flatshard/optim/moments.h"

#include <algorithm>
#include <optional>

namespace flatshard::python {
namespace {

/// Returns the index of the parameter's group among `groups`.
std::size_t index_of(
    const std::vector<ParamGroup*>& groups,
    const PyUnit& unit,
    std::size_t i) {
  const ParamGroup* wanted = &unit.group_at(unit.group_index(i));
  const auto found = std::ranges::find(groups, wanted);
  FLATSHARD_CHECK(
      found != groups.end(),
      usage,
      "this optimizer does not update that parameter");
  return found - groups.begin();
}

std::vector<MatrixShape> matrices_of(
    const GroupParameter& parameter,
    std::vector<std::int64_t> rows) {
  const std::vector<std::int64_t> shape = parameter.whole_shape();
  const std::size_t num_dims = shape.size();
  FLATSHARD_CHECK(
      num_dims == 2 || num_dims == 3,
      config,
      "Muon: expected a parameter with two dimensions, or three for a stack of "
      "matrices, got {} in {}",
      num_dims,
      parameter.names.front());
  if (rows.empty()) {
    rows = {shape[num_dims - 2]};
  }
  const std::int64_t count = num_dims == 3 ? shape.front() : 1;
  std::vector<MatrixShape> matrices;
  for (std::int64_t i = 0; i < count; ++i) {
    for (const std::int64_t n : rows) {
      matrices.push_back({.rows = n, .columns = shape.back()});
    }
  }
  return matrices;
}

/// Returns the ranks of `mesh` that store the parameter together.
Communicator* ranks_in(
    Mesh& mesh,
    const ParamGroup& group,
    const std::vector<std::string>& cut_axes) {
  const std::vector<std::string> own = group.mesh()->axis_names();
  const auto& placements = group.weights().main().placements();
  std::vector<int> axes;
  std::size_t num_own = 0;
  for (int axis = 0; axis < mesh.num_axes(); ++axis) {
    const std::string& name = mesh.axis(axis).name;
    const auto found = std::ranges::find(own, name);
    num_own += found != own.end() ? 1 : 0;
    const bool has_other_parts =
        found == own.end() ? std::ranges::find(cut_axes, name) != cut_axes.end()
                           : placements[found - own.begin()].is_shard();
    if (has_other_parts && mesh.axis(axis).size > 1) {
      axes.push_back(axis);
    }
  }
  FLATSHARD_CHECK(
      num_own == own.size(),
      config,
      "{}: Muon does not support tensor parallelism with a flattened "
      "data-parallel mesh; pass its dimensions to fully_shard",
      group.name());
  return axes.empty() ? nullptr : &mesh.communicator(axes, Purpose::reduce);
}

/// Returns the states of each parameter of a group. Split between rows, each
/// is one piece on a rank.
std::vector<std::map<std::string, at::Tensor>> states_of(
    const Optimizer& optimizer,
    std::size_t group) {
  std::map<std::string, std::size_t> index;
  for (const GroupParameter& p : optimizer.groups()[group]->parameters()) {
    index.emplace(p.names.front(), index.size());
  }
  std::vector<std::map<std::string, at::Tensor>> states(index.size());
  for (const auto& [name, shards] : optimizer.state_shards(group)) {
    for (const NamedShard& shard : shards) {
      states.at(index.at(shard.name()))[name] = shard.tensor;
    }
  }
  return states;
}

}  // namespace

PyOptimizer::PyOptimizer(
    std::vector<std::shared_ptr<PyUnit>> units,
    const std::vector<std::vector<std::int64_t>>& group_of_parameters,
    const std::vector<ParameterValues>& values,
    const MatrixOptions& matrices)
    : units_(std::move(units)) {
  // By its address, because names are not unique before the first forward.
  struct Member {
    std::size_t group = 0;
    std::vector<std::int64_t> split_sizes;
    std::vector<std::string> cut_axes;
  };
  std::map<const GroupParameter*, Member> members;
  std::vector<ParamGroup*> groups;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const PyUnit& unit = *units_[u];
    for (std::int64_t i = 0; i < unit.num_parameters(); ++i) {
      const std::int64_t index = group_of_parameters.at(u).at(i);
      if (index < 0 || !unit.trainable(i)) {
        continue;
      }
      ParamGroup& group = unit.group_at(unit.group_index(i));
      if (std::ranges::find(groups, &group) == groups.end()) {
        groups.push_back(&group);
      }
      const GroupParameter& parameter =
          group.parameters().at(unit.index_in_group(i));
      Member& member = members[&parameter];
      member.group = static_cast<std::size_t>(index);
      if (state_format_of(parameter, values.at(member.group).state_dtype) ==
          StateFormat::int8) {
        unit.check_int8_states();
      }
      if (!matrices.split_sizes.empty()) {
        member.split_sizes = matrices.split_sizes.at(member.group);
      }
      if (matrices.mesh) {
        member.cut_axes = matrices.cut_axes.at(u).at(i);
      }
    }
  }
  ParameterGroups parameters;
  for (const ParameterValues& of_group : values) {
    parameters.groups.push_back(
        {.title = std::to_string(parameters.groups.size()),
         .values = of_group});
  }
  for (const ParamGroup* group : groups) {
    auto& of_group = parameters.of_parameters.emplace_back();
    for (const GroupParameter& parameter : group->parameters()) {
      const auto member = members.find(&parameter);
      of_group.push_back(
          member == members.end() ? ParameterGroups::kNotUpdated
                                  : member->second.group);
    }
  }
  parameters.muon.matrices_of = [members](const GroupParameter& parameter) {
    return matrices_of(parameter, members.at(&parameter).split_sizes);
  };
  if (matrices.mesh) {
    parameters.muon.ranks_of = [members, mesh = matrices.mesh](
                                   const ParamGroup& group,
                                   const GroupParameter& parameter) {
      return ranks_in(*mesh, group, members.at(&parameter).cut_axes);
    };
  }
  optimizer_ = std::make_unique<Optimizer>(groups, std::move(parameters));
  for (std::size_t g = 0; g < groups.size(); ++g) {
    states_.push_back(states_of(*optimizer_, g));
  }
}

void PyOptimizer::step(
    const std::vector<ParameterValues>& values,
    const std::vector<std::vector<std::size_t>>& without_gradient) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    optimizer_->set_values(i, values[i]);
  }
  const std::vector<ParamGroup*>& groups = optimizer_->groups();
  Optimizer::OfParameters without(groups.size());
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const PyUnit& unit = *units_[u];
    for (const std::size_t i : without_gradient.at(u)) {
      ParamGroup* group = &unit.group_at(unit.group_index(i));
      const auto found = std::ranges::find(groups, group);
      if (found != groups.end()) {
        std::vector<bool>& of_group = without[found - groups.begin()];
        of_group.resize(group->parameters().size());
        of_group.at(unit.index_in_group(i)) = true;
      }
    }
  }
  optimizer_->step(/*lr=*/1, /*grad_scale=*/{}, without);
}

std::map<std::string, at::Tensor> PyOptimizer::state(
    const std::shared_ptr<PyUnit>& unit,
    std::size_t i) const {
  std::map<std::string, at::Tensor> state;
  for (const auto& [name, shard] : shards_of(*unit, i)) {
    if (!name.ends_with(kScaleSuffix)) {
      state[name] = unit->rows_at(i, shard, 0);
    }
  }
  return state;
}

std::map<std::string, at::Tensor> PyOptimizer::decoded(
    const std::shared_ptr<PyUnit>& unit,
    std::size_t i) const {
  std::map<std::string, at::Tensor> values;
  const States& shards = shards_of(*unit, i);
  for (const auto& [name, shard] : shards) {
    const auto scales = shards.find(name + std::string(kScaleSuffix));
    if (scales != shards.end()) {
      values[name] = unit->rows_at(i, decode_states(shard, scales->second), 0);
    }
  }
  return values;
}

void PyOptimizer::encode(
    const std::shared_ptr<PyUnit>& unit,
    std::size_t i,
    const std::string& name,
    const at::Tensor& values) {
  const States& shards = shards_of(*unit, i);
  encode_states(
      values.reshape({-1}),
      shards.at(name),
      shards.at(name + std::string(kScaleSuffix)));
}

void PyOptimizer::set_num_updates(
    const std::shared_ptr<PyUnit>& unit,
    std::size_t i,
    std::int64_t updates) {
  optimizer_->set_num_updates(
      group_of(*unit, i),
      unit->index_in_group(i),
      updates);
  optimizer_->set_num_steps(std::max(updates, optimizer_->num_steps()));
}

std::size_t PyOptimizer::group_of(const PyUnit& unit, std::size_t i) const {
  return index_of(optimizer_->groups(), unit, i);
}

const PyOptimizer::States& PyOptimizer::shards_of(
    const PyUnit& unit,
    std::size_t i) const {
  return states_.at(group_of(unit, i)).at(unit.index_in_group(i));
}

SeveralOptimizers::SeveralOptimizers(
    std::vector<std::shared_ptr<PyOptimizer>> of)
    : Optimizer([&] {
        std::vector<ParamGroup*> groups;
        for (const auto& optimizer : of) {
          for (ParamGroup* group : optimizer->optimizer().groups()) {
            if (std::ranges::find(groups, group) == groups.end()) {
              groups.push_back(group);
            }
          }
        }
        return groups;
      }()),
      of_(std::move(of)) {
}

template <class F>
void SeveralOptimizers::for_each_of(std::size_t group, F&& visit) const {
  for (const auto& optimizer : of_) {
    const auto& own = optimizer->optimizer().groups();
    const auto found = std::ranges::find(own, groups()[group]);
    if (found != own.end()) {
      visit(*optimizer, static_cast<std::size_t>(found - own.begin()));
    }
  }
}

template <class F>
void SeveralOptimizers::for_each_parameter(F&& visit) const {
  for (std::size_t g = 0; g < groups().size(); ++g) {
    for_each_of(g, [&](PyOptimizer& of, std::size_t index) {
      for (std::size_t i = 0; i < groups()[g]->parameters().size(); ++i) {
        if (of.optimizer().updates(index, i)) {
          visit(g, i, of.optimizer(), index);
        }
      }
    });
  }
}

void SeveralOptimizers::take_updates() {
  std::int64_t most = 0;
  for_each_parameter(
      [&](std::size_t g, std::size_t i, Optimizer& of, auto own) {
        set_num_updates(g, i, of.num_updates(own, i));
        most = std::max(most, of.num_steps());
      });
  set_num_steps(most);
}

void SeveralOptimizers::give_updates() {
  for_each_parameter(
      [&](std::size_t g, std::size_t i, Optimizer& of, auto own) {
        of.set_num_updates(own, i, num_updates(g, i));
        of.set_num_steps(num_steps());
      });
}

std::vector<std::pair<std::string, std::vector<NamedShard>>>
SeveralOptimizers::state_shards(std::size_t group) const {
  std::vector<std::pair<std::string, std::vector<NamedShard>>> all;
  for_each_of(group, [&](PyOptimizer& of, std::size_t index) {
    auto own = of.optimizer().state_shards(index);
    std::ranges::move(own, std::back_inserter(all));
  });
  return all;
}

}  // namespace flatshard::python
