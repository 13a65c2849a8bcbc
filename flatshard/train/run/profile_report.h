#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>

#include "flatshard/diagnostics/step_profile.h"
#include "flatshard/models/config.h"
#include "flatshard/train/config/run_config.h"
#include "flatshard/train/metrics/profile.h"
#include "flatshard/train/run/run_output.h"

namespace flatshard {

/// The trace of the step that [profiling] names, on rank 0, and a table of
/// where its time went: the GPU's against the speed of light, without one the
/// host's.
class ProfileReport {
 public:
  /// @param output  where rank 0 prints; null on the others, which record
  ///   nothing.
  /// @param light  what to compare the GPU's time with.
  ProfileReport(
      const Config& config,
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

  const bool enabled_;
  const std::int64_t step_;
  const std::filesystem::path folder_;
  const SpeedOfLight light_;
  TraceRecorder recorder_;
  RunOutput* output_;
};

/// Returns the FLOPs of a rank's step by class of kernel, and what the GPU can
/// do.
/// @param sequences  that a rank trains on in a step.
SpeedOfLight speed_of_light(
    const Config& config,
    const models::ModelConfig& model,
    at::Device device,
    std::int64_t sequences);

}  // namespace flatshard
