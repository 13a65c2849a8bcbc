#pragma once

#include "flatshard/data/loader.h"
#include "flatshard/launch/environment.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/models/config.h"
#include "flatshard/optim/lr_schedule.h"
#include "flatshard/train/data/run_data.h"
#include "flatshard/train/metrics/start_clock.h"
#include "flatshard/train/metrics/step_meter.h"
#include "flatshard/train/run/expert_loads.h"
#include "flatshard/train/run/from_config.h"
#include "flatshard/train/run/microbatches.h"
#include "flatshard/train/run/nonfinite_guard.h"
#include "flatshard/train/run/run_lock.h"
#include "flatshard/train/run/signal_requests.h"
#include "flatshard/train/setup/train_state.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

/// One rank of a training run, from a Config to trained weights on disk.
///
/// Rank 0 prints and writes below `run.output_dir`: config.toml,
/// metrics.jsonl, model.safetensors at the end. All ranks write checkpoints.
class Trainer {
 public:
  /// The reason why a run stopped.
  struct Stop {
    int signal = 0;         ///< SIGINT, SIGTERM or SIGHUP
    std::int64_t step = 0;  ///< the last one that was trained
    bool saved = false;     ///< a checkpoint was saved
  };

  /// Builds everything; collective over all ranks.
  /// @param device  "auto", "cpu" or "cuda".
  /// @param resume  continue from the latest checkpoint, if there is one.
  /// @param on_stuck_abort  for the mesh, see OnStuckAbort.
  Trainer(
      const Config& config,
      const RankEnvironment& env,
      const std::string& device,
      bool resume = false,
      OnStuckAbort on_stuck_abort = {});
  ~Trainer();

  /// Trains up to step `training.steps`.
  /// @return how the run was stopped; unset: it is finished.
  std::optional<Stop> run();

  const Runtime& runtime() const { return *state_.runtime; }

 private:
  /// The results of a step, for reports.
  struct TrainedStep {
    /// See Microbatches::forward_backward. Undefined where no token of the step
    /// is trained: the weights stayed as they were.
    at::Tensor loss;
    at::Tensor norm;  ///< [] float32 on the device: the global gradient norm
    double lr = 0;
  };

  // -- trainer_setup.cpp: before the first step

  /// Rank 0 locks the run's folder, without touching a file of it.
  void lock_folder(int restart_count);
  /// Builds everything that is used in a step.
  void build(std::vector<ValidationSet> validation_sets);
  /// Returns the state at the start of this attempt. On rank 0, after `build`.
  StartMetrics start_metrics() const;
  /// Loads the checkpoint to continue from, or the weights of model.init_from.
  void load_weights(bool resume);
  /// Loads the weights of model.init_from, for parameters that no checkpoint
  /// has.
  void take_weights();

  // -- trainer.cpp: the run

  /// Runs `work`; its exceptions are reported to the other ranks.
  void watched(const std::function<void()>& work);
  std::optional<Stop> train();
  /// Unset if the gradient is rejected; see NonfiniteGuard.
  std::optional<TrainedStep> train_step(std::int64_t step, bool logged);
  /// Rank 0 opens the run's files when all ranks have come so far, and no rank
  /// continues before. Collective; once.
  void open_output();
  /// Collective; blocks.
  void log_step(std::int64_t step, const TrainedStep& trained);
  /// Returns the requests of signals, as rank 0 sees them. Collective; blocks.
  Requests take_requests(std::int64_t step);
  /// Saves a checkpoint if one is due or asked for, and reports earlier ones.
  void save_if(bool asked, std::int64_t step);
  /// Sends the weights to an engine if that is due.
  void send_weights_if_due(std::int64_t step);
  /// @param loss  see TrainedStep
  void show_progress(std::int64_t step, const at::Tensor& loss);
  /// Returns the number of tokens of all ranks and attempts, up to the step
  /// that was loaded last.
  std::int64_t tokens_seen() const;
  /// Does the work after the last step. Collective.
  void finish(const std::optional<Stop>& stop);
  void save_model();

  StartClock start_clock_;  ///< the first, because it begins first
  bool reported_start_ = false;
  const Config given_;  ///< as the user set it
  Config config_;
  const at::Device device_;
  const models::ModelConfig model_config_;
  RunOptions options_;  ///< made from config_
  const LrSchedule schedule_;
  data::Loader loader_;
  std::shared_ptr<Mesh> mesh_;
  TrainState state_;
  std::optional<RunLock> lock_;      ///< only on rank 0
  std::optional<RunOutput> output_;  ///< only on rank 0
  bool opened_output_ = false;
  RunStart start_;
  std::optional<SignalRequests> requests_;
  std::optional<RunData> data_;                ///< only on rank 0
  std::optional<RunCheckpoints> checkpoints_;  ///< destroyed before its data
  std::optional<ExpertLoads> experts_;
  std::optional<Batches> batches_;
  std::optional<Microbatches> microbatches_;
  std::optional<Evaluation> evaluation_;  ///< unset: no validation
  std::optional<WeightSender> sender_;    ///< unset: weights are not sent
  std::optional<RunDiagnostics> diagnostics_;
  std::optional<NonfiniteGuard> guard_;
  std::optional<StepMeter> meter_;
  std::optional<ProfileReport> profile_;
};

}  // namespace flatshard
