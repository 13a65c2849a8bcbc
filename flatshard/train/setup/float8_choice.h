#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/models/config.h"
#include "flatshard/train/config/precision_keys.h"

namespace flatshard {

/// The effect of [float8] on the weights of a run.
struct Float8Effect {
  /// Counts FP8 weights and others, with their reasons; empty: no recipe is
  /// set.
  std::string text;
  /// A recipe is set, but no weight is FP8. `text` names what to change.
  bool is_none = false;
};

/// The choice of [float8] for each weight.
class Float8Choice {
 public:
  Float8Choice(const config::Float8& keys, const models::ModelConfig& model);

  /// FP8 is chosen for some weights.
  bool enabled() const { return format_.has_value(); }
  /// `exclude` or `keep_first_last` names the parameter.
  bool excludes(const std::string& name) const {
    return excluding_pattern(name) != nullptr;
  }
  /// Returns why a parameter that linear layers read stays in bfloat16; empty:
  /// it does not.
  std::string why_not(
      const std::string& name,
      const std::vector<std::int64_t>& shape) const;
  /// Sets FullyShardOptions::float8_of.
  void apply_to(FullyShardOptions& options) const;
  /// Requires enabled().
  Float8Effect effect_on(const Runtime& runtime) const;

 private:
  const std::string* excluding_pattern(const std::string& name) const;

  std::optional<Float8Format> format_;
  std::vector<std::string> excluded_;  ///< shell patterns
};

}  // namespace flatshard
