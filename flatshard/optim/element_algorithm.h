#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "flatshard/optim/update_algorithm.h"
#include "flatshard/optim/update_rules.h"

namespace flatshard {

/// The algorithm of a rule. Its states are float32, and a group has them when
/// Rule::has_states(values) is true.
template <class Rule>
class ElementAlgorithm : public UpdateAlgorithm {
 public:
  explicit ElementAlgorithm(Algorithm algorithm) : algorithm_(algorithm) {}

  void add_group(
      std::size_t group,
      const at::Tensor& main,
      std::span<const ParameterValues> values) override {
    if (!Rule::has_states(values)) {
      return;
    }
    for (at::Tensor& state : states_[group]) {
      state = at::zeros(
          {main.numel()},
          main.options().dtype(at::kFloat).device(state_device()));
    }
  }

  std::vector<std::pair<std::string, at::Tensor>> state(
      std::size_t group) const override {
    std::vector<std::pair<std::string, at::Tensor>> named;
    const auto found = states_.find(group);
    if (found != states_.end()) {
      for (std::size_t i = 0; i < kNumStates; ++i) {
        named.emplace_back(Rule::kStates[i], found->second[i]);
      }
    }
    return named;
  }

  UpdateRow row(const ParameterValues& values, double lr, std::int64_t updates)
      const override {
    return Rule::row(values, lr, updates);
  }

  void visit_states(
      std::size_t group,
      const std::function<void(at::Tensor&)>& visit) override {
    const auto found = states_.find(group);
    if (found != states_.end()) {
      std::ranges::for_each(found->second, visit);
    }
  }

  void set_states(std::size_t group, FlatUpdate& update) const override {
    const auto found = states_.find(group);
    const bool has_states = found != states_.end();
    update.state0 = has_states ? found->second[0] : at::Tensor();
    if constexpr (kNumStates > 1) {
      update.state1 = has_states ? found->second[1] : at::Tensor();
    }
  }

  void update(std::size_t /*group*/, FlatUpdate& update) override {
    flat_update(algorithm_, update);
  }

 private:
  static constexpr std::size_t kNumStates = Rule::kStates.size();
  static_assert(kNumStates >= 1 && kNumStates <= 2);

  Algorithm algorithm_;
  std::map<std::size_t, std::array<at::Tensor, kNumStates>> states_;
};

}  // namespace flatshard
