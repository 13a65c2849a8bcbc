#pragma once

#include <cstdint>
#include <optional>

#include "flatshard/mesh/mesh.h"
#include "flatshard/train/config/run_config.h"

namespace flatshard {

/// Where a run begins.
struct RunStart {
  /// The step whose checkpoint it continues from; unset: from scratch.
  std::optional<std::int64_t> checkpoint;
  bool goes_on = false;       ///< with an earlier run's files
  bool nothing_left = false;  ///< the run had ended before

  std::int64_t first_step() const { return checkpoint.value_or(0) + 1; }
};

/// Starts from checkpoint.load_step, or with `resume` from the latest
/// checkpoint. Nothing is left when that is past training.steps. The same holds
/// when it is just there and metrics.jsonl shows that everything after the last
/// step was written. Rank 0 looks, all ranks get its answer. Collective.
/// @throws Error{io} when load_step has no checkpoint; like
/// refuse_foreign_files on rank 0.
RunStart find_start(const Config& config, bool resume, Mesh& mesh);

/// Sequences per step for a run that continues from the checkpoint of `step`:
/// as many as before when the config leaves the number to the ranks, else the
/// config's, which is resolved. Collective.
/// @param derived  training.global_batch_size is -1 in the user's config.
/// @throws Error{config} when these ranks cannot train on it.
std::int64_t global_batch_from(
    std::int64_t step,
    const Config& config,
    bool derived,
    Mesh& mesh);

}  // namespace flatshard
