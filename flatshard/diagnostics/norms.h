#pragma once

#include "flatshard/runtime/runtime.h"

#include <optional>
#include <string>
#include <vector>

namespace flatshard {

/// 2-norms of one unsharded parameter, over all of its shards.
struct ParameterNorm {
  std::string name;
  double weight = 0;           ///< of the main weights
  std::optional<double> grad;  ///< of the reduced gradient; unset: no gradient
};

/// Norms of every parameter, in order of units. Call it between the last
/// backward of a step and the optimizer's step: the weights are those that the
/// gradients belong to, and gradients are those before clipping.
///
/// Each rank sums the squares of its shards (in float32 or wider, added in
/// float64); one all-reduce then serves all parameters. Replicated elements
/// (HSDP's outer axis, ZeRO-0) count once. Frozen parameters are included.
/// Collective; blocks the host.
std::vector<ParameterNorm> parameter_norms(const Runtime& runtime);

/// Returns a table, one line per parameter: weight, gradient, gradient /
/// weight.
std::string to_string(const std::vector<ParameterNorm>& norms);

}  // namespace flatshard
