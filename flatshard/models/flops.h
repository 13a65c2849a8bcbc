#pragma once

#include "flatshard/models/config.h"

#include <cstdint>

namespace flatshard::models {

/// Returns the number of parameters of the full model; tied embeddings count
/// once.
std::int64_t num_parameters(const ModelConfig& config);

/// Returns the same with only the experts that one token activates.
std::int64_t num_active_parameters(const ModelConfig& config);

/// Returns the number of parameters of routed experts, in all layers: expert
/// parallelism divides these.
std::int64_t num_expert_parameters(const ModelConfig& config);

/// Active parameters that are used in matmuls: all but the input embedding (a
/// tied one is used, as the head).
std::int64_t num_matmul_parameters(const ModelConfig& config);

enum class FlopsConvention {
  /// Convention of torchtitan: 6 N + 12 L heads head_dim T, with
  /// N without the input embedding and attention counted as if
  /// it were not causal. Used for mfu. Blocks with a window
  /// count twice the work of a causal kernel, like all other
  /// blocks.
  full_attention,
  /// The work that causal kernels do: half of the attention term.
  causal,
};

/// Floating-point operations of forward and backward for one token in a
/// sequence of `seq_len`; recomputation is not counted.
double flops_per_token(
    const ModelConfig& config,
    std::int64_t seq_len,
    FlopsConvention convention = FlopsConvention::full_attention);

}  // namespace flatshard::models
