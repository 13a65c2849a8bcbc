#pragma once

#include "flatshard/nn/module.h"

#include <cstdint>
#include <string>
#include <vector>

namespace flatshard {

class Runtime;

/// The conditions of a step's capture. A replay has to find them again.
struct StepStamp {
  // Another one of these, and what was captured is dropped.
  std::int64_t num_plans = 0;
  std::int64_t num_rule_changes = 0;
  // Another one of these, and the step runs eagerly.
  bool is_last_microbatch = true;
  bool sync_gradients = true;
  std::vector<bool> requires_grad;     ///< by parameter
  std::vector<bool> training;          ///< by module
  std::vector<const void*> addresses;  ///< of the groups' weights

  /// Between two steps.
  static StepStamp of(
      const Runtime& runtime,
      const std::vector<nn::Module*>& modules);
  /// Returns the difference of `now`, the reason for an eager step; empty:
  /// none.
  std::string difference(const StepStamp& now) const;
  /// Returns why a step that starts now cannot be captured; empty: it can.
  /// @throws Error{usage} when a parameter has another storage.
  static std::string obstacle(const Runtime& runtime);
};

}  // namespace flatshard
