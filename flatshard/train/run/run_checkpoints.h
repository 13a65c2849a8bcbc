#pragma once

#include "flatshard/checkpoint/checkpointer.h"
#include "flatshard/data/loader.h"
#include "flatshard/optim/lr_schedule.h"
#include "flatshard/train/config/training_keys.h"
#include "flatshard/train/data/run_data.h"
#include "flatshard/train/run/run_output.h"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard {

/// The checkpoints of a training run: when one is due, its contents in addition
/// to the tensors, and the messages to a user.
class RunCheckpoints {
 public:
  /// The parts of a run. All of it must outlive this.
  struct Parts {
    std::shared_ptr<Mesh> mesh;
    std::vector<ParamGroup*> groups;
    Optimizer* optimizer = nullptr;
    data::Loader* loader = nullptr;
    std::vector<WholeTensor> buffers;  ///< of the model
    const RunData* data = nullptr;     ///< null except on rank 0
    RunOutput* output = nullptr;       ///< null except on rank 0
  };

  struct Options {
    config::Checkpoint keys;
    std::filesystem::path folder;
    std::int64_t last_step = 0;
    std::int64_t seed = 0;
    std::int64_t num_experts = 0;  ///< per layer of the model
    std::string config;            ///< config of the run, as text
    LrSchedule schedule;
  };

  /// Collective when checkpoints are to be written.
  RunCheckpoints(Options options, Parts parts);

  /// Sets the frozen weights that the run's adapters belong to: a text of
  /// digests (train/setup/base_digest.h) that checkpoints keep and `load`
  /// compares.
  void set_base(std::string digests) { base_ = std::move(digests); }

  /// Loads the checkpoint of `step`: weights, optimizer, the loader's place.
  /// Collective. @throws like load_checkpoint; Error{config} if the run has
  /// another seed, sequence length or dataset. Logs a warning for other
  /// validation data.
  void load(std::int64_t step);

  /// Checkpoints are written at all (checkpoint.interval > 0).
  bool enabled() const { return checkpointer_ != nullptr; }
  /// Returns whether a regular one is due after this step.
  bool due(std::int64_t step) const;
  /// Starts to save the state after `step`. With checkpoint.async off, waits.
  void save(std::int64_t step);
  /// Call before the optimizer changes anything.
  void before_update();
  /// Reports the results of earlier saves, without waiting.
  void report();
  /// Waits for all saves. @throws the error of the last one, if it failed.
  void finish();
  /// Returns the last step with a complete checkpoint.
  std::optional<std::int64_t> last_saved() const { return last_saved_; }

  std::int64_t staging_nbytes() const;

 private:
  std::map<std::string, std::string> state() const;

  const Options options_;
  const Parts parts_;
  std::unique_ptr<Checkpointer> checkpointer_;
  std::optional<std::int64_t> last_begun_;
  std::optional<std::int64_t> last_saved_;
  std::optional<Error> last_error_;
  std::string base_;  ///< empty: checkpoints contain all weights
};

}  // namespace flatshard
