#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "flatshard/train/metrics/metrics.h"

namespace flatshard {

struct GraphStats;     // runtime/graph_options.h
struct ParameterNorm;  // diagnostics/norms.h

/// Appends one JSON object a line to metrics.jsonl; every line is on its way
/// to the file when the call returns, whole or not at all: a line that does not
/// fit the disk is taken back. A loss that is not finite is null.
///
/// Every row has "step", "time" (UTC, ISO 8601) and "attempt", which counts how
/// often the run was begun: 1, and one more each time that the file is appended
/// to. A row whose step was or will be trained again has "overtaken": true.
class MetricsFile {
 public:
  enum class Mode { truncate, append };

  /// @throws Error{io} when the file cannot be opened.
  explicit MetricsFile(
      const std::filesystem::path& path,
      Mode mode = Mode::truncate);
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;
  ~MetricsFile();

  int attempt() const { return attempt_; }

  /// Marks all rows of steps after `step`: the run goes on from there. The file
  /// is replaced in one step. @throws Error{io}.
  void mark_overtaken(std::int64_t step);

  void write(const StepMetrics& metrics);
  /// A row {"step", "ended": true}: what comes after the last step is on disk.
  void write_ended(std::int64_t step);
  /// A row {"step", "cuda_graph": {"captures", "forward_replays",
  /// "backward_replays", "step_replays", "nbytes", "fallbacks": {reason:
  /// count}}}.
  void write_graphs(std::int64_t step, const GraphStats& stats);
  /// A row {"step", "nonfinite": what, "goes_on_after": step}.
  void write_nonfinite(
      std::int64_t step,
      const std::string& what,
      std::int64_t goes_on_after);
  /// A row {"step", "validation_loss", "perplexity"}, "bits_per_byte" of byte
  /// tokens, and "validation_losses" {folder: loss} of a mixture.
  void write_validation(const ValidationMetrics& metrics);
  /// A row {"step", "weight_norms": {name: norm}, "grad_norms": {name: norm}}.
  void write_norms(std::int64_t step, const std::vector<ParameterNorm>& norms);

 private:
  void open(int flags);
  void write_line(const std::string& line);

  std::filesystem::path path_;
  int fd_ = -1;
  int attempt_ = 1;
};

/// Whether a metrics.jsonl has the row of `write_ended` for `step`, not
/// overtaken. False when there is no such file.
bool metrics_say_ended(const std::filesystem::path& path, std::int64_t step);

}  // namespace flatshard
