#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "flatshard/core/append_file.h"
#include "flatshard/train/metrics/metrics.h"

namespace flatshard {

struct GraphStats;     // runtime/graph_options.h
struct HostOperator;   // train/metrics/host_operators.h
struct ParameterNorm;  // diagnostics/norms.h
struct StepProfile;    // diagnostics/step_profile.h

/// Appends one JSON object per line to metrics.jsonl. Each line is passed to
/// the file when the call returns, completely or not at all.
/// docs/reference/log_and_metrics.md describes all rows and fields.
///
/// Every row has "step", "time" (UTC, ISO 8601) and "attempt". "attempt"
/// counts the starts of the run: 1, plus one each time that the file is
/// appended to. A row whose step was or will be trained again has "overtaken":
/// true. A number that is not finite is null, and "not_finite" has its text at
/// the same place.
class MetricsFile {
 public:
  using Mode = AppendFile::Mode;

  /// @throws Error{io} when the file cannot be opened.
  explicit MetricsFile(
      const std::filesystem::path& path,
      Mode mode = Mode::truncate);

  int attempt() const { return attempt_; }

  /// Marks all rows of steps after `step`: the run continues from there. The
  /// file is replaced in one step. @throws Error{io}.
  void mark_overtaken(std::int64_t step);

  /// A row {"step": done, "start": {"steps", "ranks", "device", "parameters",
  /// "tokens_per_step", "environment": {name: text}}}.
  void write_start(const StartMetrics& metrics);
  void write(const StepMetrics& metrics);
  /// A row {"step", "ended": true}: all final output of the run is on disk.
  void write_ended(std::int64_t step);
  /// A row {"step", "cuda_graph": {"captures", "forward_replays",
  /// "backward_replays", "step_replays", "nbytes", "fallbacks": {reason:
  /// count}}}.
  void write_graphs(std::int64_t step, const GraphStats& stats);
  /// A row {"step", "nonfinite": what, "goes_on_after": step}; the latter is
  /// left out when the run ends.
  void write_nonfinite(
      std::int64_t step,
      const std::string& what,
      std::optional<std::int64_t> goes_on_after);
  /// A row {"step", "checkpoint_s"}: the checkpoint of `step` is complete.
  void write_checkpoint(std::int64_t step, double seconds);
  /// A row {"step", "checkpoint_error"}.
  void write_checkpoint_error(std::int64_t step, const std::string& error);
  /// A row {"step", "weights_s", "weights_nbytes"}: an engine has the weights
  /// of `step`.
  void write_weights(std::int64_t step, double seconds, std::int64_t nbytes);
  /// A row {"step", "weights_error", "weights_failures"}.
  /// @param failures  of this start, with this one.
  void write_weights_error(
      std::int64_t step,
      const std::string& error,
      std::int64_t failures);
  /// A row {"step", "profile": {"span_ms", "compute_ms", "exposed_ms",
  /// "idle_ms", "classes_ms": {name: ms}}} of a GPU.
  void write_profile(std::int64_t step, const StepProfile& profile);
  /// A row {"step", "profile": {"operators_ms": {name: ms}}} of a host, the
  /// longest first, the rest as "other".
  void write_profile(
      std::int64_t step,
      const std::vector<HostOperator>& operators);
  /// A row {"step", "validation_loss", "perplexity"}, "bits_per_byte" of byte
  /// tokens, and "validation_losses" {folder: loss} of a mixture.
  void write_validation(const ValidationMetrics& metrics);
  /// A row {"step", "weight_norms": {name: norm}, "grad_norms": {name: norm}}.
  void write_norms(std::int64_t step, const std::vector<ParameterNorm>& norms);

 private:
  AppendFile file_;
  int attempt_ = 1;
};

/// Returns whether a metrics.jsonl has the row of `write_ended` for `step`, not
/// overtaken. False when there is no such file.
bool metrics_say_ended(const std::filesystem::path& path, std::int64_t step);

}  // namespace flatshard
