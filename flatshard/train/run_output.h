#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "flatshard/train/config.h"
#include "flatshard/train/metrics.h"
#include "flatshard/unit/graph_options.h"

namespace flatshard {

/// The option that errors of these files name.
inline constexpr std::string_view kOutputDir = "run.output_dir";

/// What a run prints and writes below run.output_dir: config.toml,
/// metrics.jsonl, the lines of its log. One rank has it.
class RunOutput {
 public:
  /// Touches no file: `open` does.
  RunOutput() = default;

  /// Opens the files, when all that can fail has gone well on all ranks. Those
  /// of an earlier run are put aside, unless this one goes on with it. Once.
  /// @param resumed  the files of the run that this one goes on with are there
  ///   already; rows of steps after `done` are marked as overtaken.
  /// @throws Error{io} naming run.output_dir; earlier files are back then.
  void open(const Config& config, bool resumed, std::int64_t done);

  void print(const std::string& text);
  void step(const StepMetrics& metrics);
  void validation(const ValidationMetrics& metrics);
  void norms(std::int64_t step, const std::vector<ParameterNorm>& norms);
  /// What CUDA graphs did in this run.
  void graphs(std::int64_t step, const GraphStats& stats);
  /// Everything that comes after the last step is on disk.
  void ended(std::int64_t step);
  /// A step whose gradient is not finite; the run goes on after `last`.
  void nonfinite(std::int64_t step, const std::string& what, std::int64_t last);

  /// The line at the bottom of a terminal; off elsewhere.
  StatusLine& status() { return status_; }

 private:
  std::optional<MetricsFile> metrics_;
  StatusLine status_;
};

}  // namespace flatshard
