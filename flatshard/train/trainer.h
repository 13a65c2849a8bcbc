#pragma once

#include "flatshard/data/loader.h"
#include "flatshard/device/stream.h"
#include "flatshard/launch/environment.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/models/llama.h"
#include "flatshard/optim/lr_schedule.h"
#include "flatshard/optim/optimizer.h"
#include "flatshard/train/config.h"
#include "flatshard/train/run_checkpoints.h"
#include "flatshard/train/run_lock.h"
#include "flatshard/train/run_output.h"
#include "flatshard/train/save_signals.h"
#include "flatshard/train/validation_set.h"
#include "flatshard/unit/runtime.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace flatshard {

class TraceRecorder;

/// One rank of a training run, from a Config to trained weights on disk.
///
/// Rank 0 prints and writes below `run.output_dir`: config.toml,
/// metrics.jsonl, model.safetensors at the end. All ranks write checkpoints.
class Trainer {
 public:
  /// How a run ended.
  enum class End {
    finished,
    stopped,  ///< by SIGINT or SIGTERM; see `stop`
  };
  /// How a run was stopped.
  struct Stop {
    int signal = 0;         ///< SIGINT or SIGTERM
    std::int64_t step = 0;  ///< the last one that was trained
    bool saved = false;     ///< it has a checkpoint
  };

  /// Builds everything; collective over all ranks.
  /// @param device  "auto", "cpu" or "cuda".
  /// @param resume  go on from the latest checkpoint, if there is one.
  /// @param on_stuck_abort  for the mesh, see OnStuckAbort.
  Trainer(
      const Config& config,
      RankEnvironment env,
      const std::string& device,
      bool resume = false,
      OnStuckAbort on_stuck_abort = {});
  ~Trainer();

  /// Trains up to step `training.steps`.
  End run();

  const Stop& stop() const { return stop_; }
  const Runtime& runtime() const { return *runtime_; }

 private:
  struct Interval;  // what is measured between two log lines

  void build(bool resume);
  /// What a run that goes on from the checkpoint of `step` takes from it before
  /// anything is built: its global batch, unless the config has a number.
  /// Collective. @throws Error{config} when these ranks cannot train on it.
  void keep_global_batch(std::int64_t step);
  /// Rank 0 opens the run's files when all ranks have come so far, and no rank
  /// goes on before. Collective; once.
  void open_output();
  /// Runs `work`; what it throws is told to the other ranks.
  void watched(const std::function<void()>& work);
  End train();
  void announce();
  /// Runs all microbatches; returns this rank's mean loss, [] float32.
  at::Tensor forward_backward(std::int64_t step, Interval& interval);
  /// Fills the host's tokens and targets and sends them to the device.
  void load(
      const std::function<
          void(std::span<std::int64_t>, std::span<std::int64_t>)>& fill,
      Interval& interval);
  /// Collective.
  ValidationMetrics validate(std::int64_t step);
  double mean_over_ranks(const at::Tensor& loss);
  /// What any rank was asked for by a signal; see SaveSignals.
  struct Requests {
    bool save = false;
    int stop_signal = 0;
  };
  /// The same answer on all ranks. Collective.
  Requests requests(std::int64_t step);
  /// Throws when the gradient of a step up to `step` was not finite: nothing
  /// that comes from it is to be saved. Waits for the device.
  void check_gradient_norms(std::int64_t step);
  /// What `training.on_nonfinite` wants of a step whose gradient is not finite:
  /// throws, or returns the step after which the run goes on. Collective.
  std::int64_t give_up_step(std::int64_t step);
  void log_step(
      std::int64_t step,
      const at::Tensor& loss,
      const at::Tensor& norm,
      double lr,
      Interval& interval);
  void install_diagnostics();
  /// Keeps units gathered as parallelism.memory_budget has room for.
  /// Collective.
  void spend_memory_budget();
  /// Ends the recording of a step: a trace, and a table when there is a GPU.
  void report_profile(TraceRecorder& recorder, std::int64_t step);
  void spoil_gradient(std::int64_t step);
  /// Everything [diagnostics] wants between the backward and the optimizer.
  void diagnose_gradients(std::int64_t step);
  void save();
  /// Of all units, frozen ones as well.
  std::vector<ParamGroup*> all_groups() const;

  const bool derives_global_batch_;  ///< training.global_batch_size was -1
  Config config_;
  RankEnvironment env_;
  at::Device device_;
  models::ModelConfig model_config_;
  std::shared_ptr<Mesh> mesh_;
  models::Llama model_{nullptr};
  std::shared_ptr<Runtime> runtime_;
  std::string copy_engines_;  ///< what choose_copy_engines said
  int num_kept_units_ = 0;
  std::unique_ptr<Optimizer> optimizer_;
  LrSchedule schedule_;
  std::optional<data::Loader> train_loader_;
  std::vector<ValidationSet> validation_sets_;  ///< empty: no validation
  std::int64_t num_microbatches_ = 1;
  at::Tensor tokens_host_;   ///< [B, T] int64, pinned on CUDA
  at::Tensor targets_host_;  ///< [B, T]
  Event tokens_copied_;      ///< from the two above
  at::Tensor tokens_;        ///< [B, T] on the device
  at::Tensor targets_;
  std::optional<RunLock> lock_;      ///< rank 0's
  std::optional<RunOutput> output_;  ///< rank 0's
  bool opened_output_ = false;
  bool goes_on_ = false;       ///< with an earlier run's files
  bool nothing_left_ = false;  ///< the run had ended before
  std::optional<SaveSignals> signals_;
  std::optional<RunCheckpoints> checkpoints_;  ///< ends before what it saves
  bool spoilt_ = false;  ///< debug.spoil_gradient_step was done
  std::int64_t first_step_ = 1;
  std::int64_t num_given_up_ = 0;  ///< steps in a row
  double flops_per_token_ = 0;
  Stop stop_;
  /// Steps between two looks at signals: about a second, the same on all ranks.
  std::int64_t requests_freq_ = 1;
  double step_ms_ = 0;  ///< as last logged
  /// Of the steps since the last look at them: [] float32 on the device each.
  std::vector<std::pair<std::int64_t, at::Tensor>> gradient_norms_;
};

}  // namespace flatshard
