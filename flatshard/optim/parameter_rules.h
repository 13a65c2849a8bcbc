#pragma once

#include "flatshard/group/param_group.h"
#include "flatshard/optim/muon/muon_options.h"
#include "flatshard/optim/parameter_values.h"
#include "flatshard/shape/group_plan.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard {

/// A parameter whose attribute `weight_decay` is "none" is not decayed.
inline constexpr const char* kWeightDecayAttribute = "weight_decay";

/// The parameter groups of an optimizer. A parameter belongs to the first rule
/// with a matching pattern, or else to `rest`.
struct ParameterRules {
  ParameterValues rest;
  std::vector<ParameterRule> rules = {};
  Decay decay = Decay::all;
  /// Of Algorithm::muon. A parameter without matrices uses AdamW instead.
  MuonOptions muon = {};
  /// Returns the names of a parameter's Hugging Face entries. Patterns are
  /// searched in them and in GroupParameter::names, except that a single entry
  /// replaces the main name. Null: no entries.
  std::function<std::vector<std::string>(const GroupParameter&)> entry_names =
      nullptr;
};

/// One parameter group: parameters that share their values.
struct ParameterGroupValues {
  std::string title;  ///< the pattern, or "the rest"; then ", no decay"
  ParameterValues values;
  std::int64_t num_parameters = 0;
  std::int64_t numel = 0;  ///< of the full parameters
};

/// All parameter groups of an optimizer, none of them empty.
struct ParameterGroups {
  /// The index of a parameter that the optimizer does not update.
  static constexpr auto kNotUpdated = static_cast<std::size_t>(-1);

  std::vector<ParameterGroupValues> groups;
  /// The index into `groups` of each parameter of each ParamGroup.
  std::vector<std::vector<std::size_t>> of_parameters;
  MuonOptions muon = {};  ///< of Algorithm::muon

  /// Returns a table for logs, one line per group after a line of titles.
  std::string table() const;
};

/// A ParamGroup, or a group that has no memory yet. Owns nothing.
struct TrainedGroup {
  std::string_view name;  ///< for errors
  std::span<const GroupParameter> parameters;
  const GroupPlan* plan = nullptr;
};
TrainedGroup trained_group(const ParamGroup& group);

/// Returns the parameter groups of the parameters of `groups`.
/// @throws Error{config} for a value that is out of range or has no effect.
/// Also
///   for a pattern that is invalid, matches only some entries of a parameter,
///   or has no parameter.
ParameterGroups parameter_groups(
    const std::vector<TrainedGroup>& groups,
    const ParameterRules& rules);
ParameterGroups parameter_groups(
    const std::vector<ParamGroup*>& groups,
    const ParameterRules& rules);

}  // namespace flatshard
