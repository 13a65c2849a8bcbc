#pragma once

#include "flatshard/optim/parameter_values.h"
#include "flatshard/train/config/key.h"

#include <optional>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

namespace flatshard::config {

/// A number of a table of [[optimizer.param_groups]].
struct RuleNumber {
  std::string_view name;
  std::variant<double ParameterRule::*, std::optional<double> ParameterRule::*>
      member;
  ValueRange range = {};
  /// The algorithms that use it; empty: all.
  std::vector<Algorithm> used_by = {};

  bool is_used_by(Algorithm algorithm) const;

  /// Returns the number; unset where the rule has the default.
  std::optional<double> of(const ParameterRule& rule) const;
  void set(ParameterRule& rule, double value) const;
};

/// Returns all of them. A table has texts in addition: pattern, name and
/// state_dtype.
std::span<const RuleNumber> rule_numbers();

}  // namespace flatshard::config
