#pragma once

#include <cstdint>
#include <filesystem>

#include "flatshard/format/event_file.h"
#include "flatshard/train/metrics/metrics.h"

namespace flatshard {

/// The folder of event files below run.output_dir.
inline constexpr const char* kTensorboardFolder = "tensorboard";

/// Writes the metrics of a run as scalars for TensorBoard, with one event file
/// for each attempt.
class TensorboardLog {
 public:
  /// Makes the folder if it is missing. @throws Error{io}.
  /// @param attempt  counts the starts of the run from 1.
  /// @param done  steps that are kept of earlier attempts: readers drop the
  ///   values of later ones.
  TensorboardLog(
      const std::filesystem::path& folder,
      int attempt,
      std::int64_t done);

  void write(const StepMetrics& metrics);
  void write_validation(const ValidationMetrics& metrics);
  /// The run rewinds: readers drop the values of steps after `step`.
  void rewind(std::int64_t step);

 private:
  EventFile file_;
};

}  // namespace flatshard
