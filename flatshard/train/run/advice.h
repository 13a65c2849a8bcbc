#pragma once

#include "flatshard/models/config.h"
#include "flatshard/train/config/run_config.h"

#include <cstdint>
#include <string>

namespace flatshard {

/// Returns the bytes that one rank's forward keeps for its backward in one
/// microbatch without recompute. An estimate of a GPU's: 25.1 GiB for
/// Llama-3-8B at seq_len 8192, as measured (docs/dev/bench_log.md, Memory).
std::int64_t activation_nbytes(
    const Config& config,
    const models::ModelConfig& model);

/// Returns a line for each default that users regret: in runs of more than 500
/// steps no warm-up, no checkpoints, or all of them kept; and memory that comes
/// near the GPU's. Empty when there is none.
/// @param config           resolved.
/// @param table_nbytes     the memory table's sum, of one rank.
/// @param capacity_nbytes  of a rank's GPU; 0: a CPU.
std::string advice(
    const Config& config,
    const models::ModelConfig& model,
    std::int64_t table_nbytes,
    std::int64_t capacity_nbytes);

}  // namespace flatshard
