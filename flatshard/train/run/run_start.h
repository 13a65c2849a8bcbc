#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "flatshard/mesh/mesh.h"
#include "flatshard/train/tools/run_files.h"

namespace flatshard {

/// Start point of a run.
struct RunStart {
  /// The step whose checkpoint it continues from; unset: from scratch.
  std::optional<std::int64_t> checkpoint;
  bool goes_on = false;       ///< with an earlier run's files
  bool nothing_left = false;  ///< the run had ended before

  std::int64_t first_step() const { return checkpoint.value_or(0) + 1; }
};

struct StartOptions {
  RunFiles files;
  std::string init_from;        ///< model.init_from
  std::int64_t load_step = -1;  ///< checkpoint.load_step
  std::int64_t last_step = 0;   ///< training.steps
};

/// Starts from checkpoint.load_step, or with `resume` from the latest
/// checkpoint. Nothing is left if that is past training.steps, or if it is at
/// training.steps and metrics.jsonl shows that everything after the last step
/// was written. Rank 0 decides for all ranks. Collective.
/// @throws Error{io} if load_step has no checkpoint; like refuse_foreign_files
/// on rank 0.
RunStart find_start(const StartOptions& options, bool resume, Mesh& mesh);

/// [training]'s batch sizes of a run.
struct BatchSizes {
  std::int64_t local = 1;
  std::int64_t global = 1;
  bool derived = false;  ///< the config leaves `global` to the ranks
};

/// Returns the sequences per step for a run that continues from the checkpoint
/// of `step` in `checkpoints`: unchanged if the config derives the number from
/// the ranks, else the number in the config. Collective.
/// @throws Error{config} when these ranks cannot train on it.
std::int64_t global_batch_from(
    std::int64_t step,
    const std::filesystem::path& checkpoints,
    const BatchSizes& sizes,
    Mesh& mesh);

}  // namespace flatshard
