#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <optional>

#include "flatshard/diagnostics/step_profile.h"
#include "flatshard/models/config.h"
#include "flatshard/train/metrics/profile.h"
#include "flatshard/train/run/run_output.h"

namespace flatshard {

/// The trace of one step, on rank 0, and a summary of its time: GPU
/// time compared with the speed of light, or host time without a
/// GPU.
class ProfileReport {
 public:
  struct Options {
    std::optional<std::int64_t> step;  ///< unset: no trace
    std::filesystem::path folder;
  };

  /// @param output  where rank 0 prints; null on the other ranks, because they
  ///   record nothing.
  /// @param light  what to compare the GPU's time with.
  ProfileReport(
      const Options& options,
      at::Device device,
      SpeedOfLight light,
      RunOutput* output);

  /// Each does nothing for a step that is not the one.
  void begin(std::int64_t step);
  /// Waits for the device, writes the trace and prints the table.
  void end(std::int64_t step);
  /// The step is given up: no trace.
  void discard(std::int64_t step);

 private:
  bool is_of(std::int64_t step) const;

  const Options options_;
  const SpeedOfLight light_;
  TraceRecorder recorder_;
  RunOutput* output_;
};

/// The work of a rank's step.
struct StepWork {
  std::int64_t sequences = 0;
  std::int64_t seq_len = 0;
  std::int64_t ranks_per_sample = 1;  ///< that read it and share the work
  double matmul_flops_per_token = 0;
};

/// Returns the FLOPs of a rank's step by class of kernel.
/// @param peak_flops  of the GPU; unset: unknown.
SpeedOfLight speed_of_light(
    const models::ModelConfig& model,
    const StepWork& work,
    std::optional<double> peak_flops);

}  // namespace flatshard
