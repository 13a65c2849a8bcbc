#pragma once

#include "flatshard/models/config.h"

#include <cstdint>
#include <string>

namespace flatshard {

/// Returns the bytes that one rank's forward saves for its backward in one
/// microbatch without recompute. An estimate for GPUs: 25.1 GiB for Llama-3-8B
/// at seq_len 8192, as measured (docs/dev/bench_log.md, Memory).
/// @param tokens        of the microbatch.
/// @param element_size  bytes of an element of the compute dtype.
std::int64_t activation_nbytes(
    const models::ModelConfig& model,
    std::int64_t tokens,
    std::int64_t element_size);

/// The numbers of a run that defaults may leave bad.
struct AdviceOptions {
  std::int64_t steps = 0;
  std::int64_t warmup_steps = 0;
  std::int64_t checkpoint_interval = 0;  ///< in steps; 0: no checkpoints
  std::int64_t kept_checkpoints = 0;     ///< 0: all
  std::int64_t checkpoint_nbytes = 0;
  bool recomputes = false;
  std::int64_t activation_nbytes = 0;  ///< without recompute
};

/// Returns a line for each default that users regret: in runs of more than 500
/// steps no warm-up, no checkpoints, or all of them kept; and memory close to
/// the capacity of the GPU. Empty if there is none.
/// @param table_nbytes     the memory table's sum, of one rank.
/// @param capacity_nbytes  of a rank's GPU; 0: a CPU.
std::string advice(
    const AdviceOptions& options,
    std::int64_t table_nbytes,
    std::int64_t capacity_nbytes);

}  // namespace flatshard
