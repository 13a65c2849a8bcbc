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
#include "flatshard/train/run_output.h"
#include "flatshard/train/save_signals.h"
#include "flatshard/train/validation_set.h"
#include "flatshard/unit/runtime.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
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
    stopped,  ///< by SIGTERM, after a checkpoint of the last step
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

  const Runtime& runtime() const { return *runtime_; }

 private:
  struct Interval;  // what is measured between two log lines

  void build(bool resume);
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
    bool stop = false;
  };
  /// The same answer on all ranks. Collective.
  Requests requests();
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
  std::optional<RunOutput> output_;  ///< rank 0's
  std::optional<SaveSignals> signals_;
  std::optional<RunCheckpoints> checkpoints_;  ///< ends before what it saves
  bool spoilt_ = false;  ///< debug.spoil_gradient_step was done
  std::int64_t first_step_ = 1;
  std::int64_t num_given_up_ = 0;  ///< steps in a row
  double flops_per_token_ = 0;
};

}  // namespace flatshard
