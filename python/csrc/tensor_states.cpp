#include "python/csrc/tensor_states.h"

#include "flatshard/core/error.h"

#include <algorithm>
#include <set>

namespace flatshard::python {
TensorStates::TensorStates(
    std::vector<std::shared_ptr<PyUnit>> units,
    const std::vector<std::vector<States>>& states)
    : Optimizer(trainable_groups_of(units)),
      units_(std::move(units)),
      states_(groups().size()) {
  for_trained([&](std::size_t u, std::size_t i, std::size_t g, std::size_t at) {
    states_[g].resize(groups()[g]->parameters().size());
    states_[g][at] = states.at(u).at(i);
  });
}

void TensorStates::set_updates(
    const std::vector<std::vector<std::int64_t>>& updates) {
  std::int64_t most = 0;
  for_trained([&](std::size_t u, std::size_t i, std::size_t g, std::size_t at) {
    const std::int64_t count = updates.at(u).at(i);
    set_num_updates(g, at, count);
    most = std::max(most, count);
  });
  set_num_steps(most);
}

template <class F>
void TensorStates::for_trained(F&& visit) const {
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const PyUnit& unit = *units_[u];
    for (std::int64_t i = 0; i < unit.num_parameters(); ++i) {
      if (unit.trainable(i)) {
        const auto* owner = &unit.group_at(unit.group_index(i));
        const auto found = std::find(groups().begin(), groups().end(), owner);
        visit(u, i, found - groups().begin(), unit.index_in_group(i));
      }
    }
  }
}

std::vector<std::pair<std::string, std::vector<NamedShard>>>
TensorStates::state_shards(std::size_t group) const {
  std::vector<std::pair<std::string, std::vector<NamedShard>>> result;
  const std::vector<NamedShard> shards = groups()[group]->main_shards();
  const std::vector<States>& states = states_[group];
  // Split between rows, a parameter is one piece on a rank.
  std::set<std::string> names;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    if (!shards[i].dropped) {
      for (const auto& [name, tensor] : states.at(i)) {
        names.insert(name);
      }
    }
  }
  for (const std::string& name : names) {
    std::vector<NamedShard> named;
    for (std::size_t i = 0; i < shards.size(); ++i) {
      if (shards[i].dropped) {
        continue;
      }
      const auto found = states.at(i).find(name);
      FLATSHARD_CHECK(
          found != states[i].end() &&
              found->second.numel() == shards[i].tensor.numel() &&
              found->second.is_contiguous(),
          usage,
          "optimizer state {} of {}: expected a contiguous tensor of {} "
          "elements, like its shard, got {}",
          name,
          shards[i].name(),
          shards[i].tensor.numel(),
          found == states[i].end() ? std::string("none")
                                   : fmt::format("{}", found->second.numel()));
      named.push_back(shards[i]);
      named.back().tensor = found->second.view(-1);
    }
    result.emplace_back(name, std::move(named));
  }
  return result;
}

}  // namespace flatshard::python
