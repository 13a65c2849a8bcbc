#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "flatshard/runtime/graph_options.h"
#include "flatshard/train/metrics/metrics.h"
#include "flatshard/train/metrics/metrics_file.h"
#include "flatshard/train/metrics/status_line.h"
#include "flatshard/train/metrics/tensorboard.h"
#include "flatshard/train/metrics/time_left.h"
#include "flatshard/train/run/signal_requests.h"
#include "flatshard/train/tools/run_files.h"
#include "flatshard/train/tools/run_sources.h"

namespace flatshard {

/// The option that errors of these files name.
inline constexpr std::string_view kOutputDir = "run.output_dir";

/// The output of a run, printed and below run.output_dir: config.toml,
/// metrics.jsonl, TensorBoard's events, the lines of its log. One rank has it.
class RunOutput {
 public:
  struct Options {
    RunFiles files;
    std::string config;  ///< config of the run, as text
    RunSources sources;
    bool tensorboard = false;
  };

  /// Touches no file: `open` does.
  RunOutput() = default;

  /// Opens the files after all fallible setup has succeeded on all ranks. Moves
  /// files of an earlier run away, unless this run continues it. Call once.
  /// @param resumed  the run that this one continues has files
  ///   already; rows of steps after `start.done` are marked as overtaken.
  /// @throws Error{io} naming run.output_dir; earlier files are back then.
  void open(const Options& options, bool resumed, const StartMetrics& start);

  void print(const std::string& text);
  void step(const StepMetrics& metrics);
  void validation(const ValidationMetrics& metrics);
  void norms(std::int64_t step, const std::vector<ParameterNorm>& norms);
  /// Prints the stats of CUDA graphs in this run.
  void graphs(std::int64_t step, const GraphStats& stats);
  /// Called when everything that comes after the last step is on disk.
  void ended(std::int64_t step);
  /// A step whose gradient is not finite; the run continues after `last`.
  void nonfinite(std::int64_t step, const std::string& what, std::int64_t last);
  /// Reports the same where the run ends; its caller prints the reason.
  void stopped_by_nonfinite(std::int64_t step, const std::string& what);
  /// The checkpoint of `step` is complete, or failed.
  void checkpoint(std::int64_t step, double seconds);
  void checkpoint_error(std::int64_t step, const std::string& error);
  /// An engine has the weights of `step`.
  void weights(std::int64_t step, double seconds, std::int64_t nbytes);
  /// @param failures  of this start, with this one.
  void weights_error(
      std::int64_t step,
      const std::string& error,
      std::int64_t failures);
  /// Reports the time breakdown of a traced step.
  void profile(std::int64_t step, const StepProfile& profile);
  void profile(std::int64_t step, const std::vector<HostOperator>& operators);

  /// Prints the requests of a signal after `step`. @param saves  checkpoints
  /// are written.
  void requested(const Requests& requests, std::int64_t step, bool saves);

  /// Starts the line at the bottom of a terminal, and elsewhere a line of the
  /// log once a minute: `done` steps of `total`.
  /// @param planned_step_s  see Progress.
  void begin_progress(
      std::int64_t done,
      std::int64_t total,
      std::optional<double> planned_step_s);
  /// Returns whether there is the line of a terminal.
  bool shows_progress() const { return status_.enabled(); }
  /// @param loss  unset: as last logged.
  /// @param tokens  seen so far by all ranks and attempts.
  void
  progress(std::int64_t step, std::optional<double> loss, std::int64_t tokens);
  void end_progress() { status_.clear(); }

 private:
  std::optional<MetricsFile> metrics_;
  std::optional<TensorboardLog> tensorboard_;  ///< unset: off
  std::optional<double> last_loss_;
  StatusLine status_;
  TimeLeft time_left_;
  std::chrono::steady_clock::time_point begin_;
  std::int64_t first_ = 0;
  std::int64_t total_ = 0;
  std::optional<double> planned_step_s_;
};

}  // namespace flatshard
