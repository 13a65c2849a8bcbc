#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace flatshard {

inline constexpr double kGiB = 1024.0 * 1024 * 1024;  ///< bytes

struct GraphStats;     // unit/graph_options.h
struct ParameterNorm;  // diagnostics/norms.h

/// What one logged step measured. Times are of the host's clock on this rank
/// and per step; where several steps lie between two log lines the caller
/// gives their mean.
struct StepMetrics {
  std::int64_t step = 0;   ///< counted from 1
  std::int64_t steps = 0;  ///< of the whole run; 0: not shown
  double loss = 0;         ///< mean over the tokens of the global batch
  double grad_norm = 0;    ///< global 2-norm before clipping
  double lr = 0;
  double step_ms = 0;
  double data_ms = 0;          ///< waiting for the loader
  double host_ms = 0;          ///< to queue the step, without waiting
  double exposed_comm_ms = 0;  ///< this step's waits for collectives
  double tokens_per_s = 0;     ///< of all ranks together
  double tokens_per_s_per_rank = 0;
  double tflops_per_rank = 0;  ///< model FLOP/s by the run's convention, 1e12
  std::optional<double> mfu;   ///< in [0, 1]; unset: the peak is unknown
  std::int64_t memory_allocated_bytes = 0;
  std::int64_t memory_peak_bytes = 0;      ///< highest allocated so far
  std::int64_t memory_reserved_bytes = 0;  ///< highest reserved so far
  std::int64_t memory_total_bytes = 0;     ///< of the device
};

/// "step: 10/1000  loss: 9.9493  grad_norm: 4.4717  lr: 3e-04
///  memory: 49.66GiB(52.28%)  tps: 11,699 (5,850/rank)  tflops: 338.79
///  mfu: 34.26%", in one line. Memory is the reserved memory and its share of
/// the device's; tps are tokens per second, of all ranks and of one when there
/// are several; tflops are a rank's; mfu is N/A without a peak.
std::string format_step(const StepMetrics& metrics);

/// What one validation found.
struct ValidationMetrics {
  std::int64_t step = 0;
  double loss = 0;  ///< nats, mean over the tokens of the sequences
  /// Of byte tokens: all sequences' loss in bits, over the bytes among their
  /// targets (the ends of documents are none).
  std::optional<double> bits_per_byte;
  /// Of a mixture: each corpus' folder and loss.
  std::vector<std::pair<std::string, double>> parts;

  double perplexity() const;  ///< exp(loss)
};

/// "step: 10  validation_loss: 1.8342  perplexity: 6.2604
///  bits_per_byte: 2.6532", in one line; the last for byte tokens alone.
std::string format_validation(const ValidationMetrics& metrics);

/// Floating-point operations in the unit that leaves a number to read:
/// 2.5e9 -> "2.50 GFLOP", 3100 -> "3.10 KFLOP".
std::string format_flop(double flop);

/// 1234567 -> "1,234,567"
std::string with_commas(std::int64_t value);

/// Seconds as "42s", "3m05s" or "1h02m".
std::string format_duration(double seconds);

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
  /// "backward_replays", "nbytes", "fallbacks": {reason: count}}}.
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

/// @throws Error{config} when `checkpoints` is an absolute folder that holds
/// some: they are not a new run's to move.
void refuse_foreign_checkpoints(const std::filesystem::path& checkpoints);

/// Moves what an earlier run wrote into `output_dir` and a new one would
/// overwrite from the start (config.toml, metrics.jsonl) to
/// <output_dir>/earlier/<n>, n counting from 1. The weights stay: a new run
/// replaces them only at its end. Checkpoints move with it.
///
/// @param checkpoints  their folder, below `output_dir` or absolute.
/// @return that folder, empty when there was nothing to keep.
/// @throws Error{io}; like refuse_foreign_checkpoints.
std::filesystem::path keep_earlier_run(
    const std::filesystem::path& output_dir,
    const std::filesystem::path& checkpoints = "checkpoints");
/// Puts it back where the new run wrote nothing yet, and removes the folder.
void restore_earlier_run(
    const std::filesystem::path& kept,
    const std::filesystem::path& output_dir,
    const std::filesystem::path& checkpoints = "checkpoints") noexcept;

/// The line at the bottom of a terminal: bar, share done, loss, time left.
/// Does nothing when `stream` is not a terminal.
class StatusLine {
 public:
  explicit StatusLine(std::FILE* stream = stderr);
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;
  /// Removes the line.
  ~StatusLine();

  bool enabled() const { return enabled_; }
  /// @param elapsed_s  time for the `done` steps so far of this process.
  /// @param first      steps done before this process began (a resumed run).
  void update(
      std::int64_t done,
      std::int64_t total,
      double loss,
      double elapsed_s,
      std::int64_t first = 0);
  /// Takes the line away, so that a log line can be written in its place.
  void clear();

  /// The text of `update` for a terminal of `width` columns.
  static std::string render(
      std::int64_t done,
      std::int64_t total,
      double loss,
      double elapsed_s,
      std::int64_t first,
      int width);

 private:
  std::FILE* stream_;
  bool enabled_;
  bool shown_ = false;
};

}  // namespace flatshard
