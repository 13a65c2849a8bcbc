#pragma once

#include "flatshard/comm/launch.h"
#include "flatshard/comm/mesh.h"
#include "flatshard/data/loader.h"
#include "flatshard/models/llama.h"
#include "flatshard/optim/lr_schedule.h"
#include "flatshard/optim/optimizer.h"
#include "flatshard/train/config.h"
#include "flatshard/train/metrics.h"
#include "flatshard/unit/runtime.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace flatshard {

/// One rank of a training run, from a Config to trained weights on disk.
///
/// Rank 0 prints and writes below `run.output_dir`: config.toml,
/// metrics.jsonl, model.safetensors at the end.
class Trainer {
 public:
  /// Builds everything; collective over all ranks.
  /// @param device  "auto", "cpu" or "cuda".
  Trainer(const Config& config, RankEnvironment env, const std::string& device);
  ~Trainer();

  /// Trains `training.steps` steps.
  void run();

  const Runtime& runtime() const { return *runtime_; }

 private:
  struct Interval;  // what is measured between two log lines

  void build();
  /// Runs `work`; what it throws is told to the other ranks.
  template <class F>
  void watched(F&& work);
  void train();
  void announce() const;
  /// Runs all microbatches; returns this rank's mean loss, [] float32.
  at::Tensor forward_backward(std::int64_t step, Interval& interval);
  void load(data::Loader& loader, std::int64_t microbatch, Interval& interval);
  double validate();
  double mean_over_ranks(const at::Tensor& loss);
  void log_step(
      std::int64_t step,
      const at::Tensor& loss,
      const at::Tensor& norm,
      double lr,
      Interval& interval);
  void install_diagnostics();
  /// Everything [diagnostics] wants between the backward and the optimizer.
  void diagnose_gradients(std::int64_t step);
  void save();

  Config config_;
  RankEnvironment env_;
  at::Device device_;
  models::ModelConfig model_config_;
  std::shared_ptr<Mesh> mesh_;
  models::Llama model_{nullptr};
  std::shared_ptr<Runtime> runtime_;
  std::unique_ptr<Optimizer> optimizer_;
  LrSchedule schedule_;
  std::optional<data::Loader> train_loader_;
  std::optional<data::Loader> validation_loader_;
  std::int64_t num_microbatches_ = 1;
  at::Tensor tokens_host_;   ///< [B, T] int64, pinned on CUDA
  at::Tensor targets_host_;  ///< [B, T]
  at::Tensor tokens_;        ///< [B, T] on the device
  at::Tensor targets_;
  std::optional<MetricsFile> metrics_;
  StatusLine status_;
  double flops_per_token_ = 0;
};

}  // namespace flatshard
