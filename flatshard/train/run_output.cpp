#include "flatshard/train/run_output.h"

#include <unistd.h>

#include <csignal>

#include "flatshard/core/log.h"
#include "flatshard/core/output.h"
#include "flatshard/train/earlier_run.h"
#include "flatshard/train/option_errors.h"
#include "flatshard/train/run_sources.h"

namespace flatshard {
namespace {

void open_files(
    std::optional<MetricsFile>& metrics,
    const Config& config,
    bool resumed,
    std::int64_t done) {
  const std::filesystem::path folder = config.run.output_dir;
  if (resumed) {
    save_config(config);
    save_run_sources(config);
    metrics.emplace(folder / "metrics.jsonl", MetricsFile::Mode::append);
    metrics->mark_overtaken(done);
    return;
  }
  const auto kept = keep_earlier_run(folder, config.checkpoint.folder);
  try {
    save_config(config);
    save_run_sources(config);
    metrics.emplace(folder / "metrics.jsonl");
  } catch (...) {
    if (!kept.empty()) {
      restore_earlier_run(kept, folder, config.checkpoint.folder);
    }
    throw;
  }
  if (!kept.empty()) {
    log_info("kept the earlier run's files in {}", kept.string());
  }
}

}  // namespace

void RunOutput::open(const Config& config, bool resumed, std::int64_t done) {
  for_option(kOutputDir, [&] { open_files(metrics_, config, resumed, done); });
}

void RunOutput::print(const std::string& text) {
  status_.clear();
  write_output(STDOUT_FILENO, text + "\n");
}

void RunOutput::step(const StepMetrics& metrics) {
  print(format_step(metrics));
  for_option(kOutputDir, [&] { metrics_->write(metrics); });
}

void RunOutput::validation(const ValidationMetrics& metrics) {
  print(format_validation(metrics));
  for_option(kOutputDir, [&] { metrics_->write_validation(metrics); });
}

void RunOutput::norms(
    std::int64_t step,
    const std::vector<ParameterNorm>& norms) {
  for_option(kOutputDir, [&] { metrics_->write_norms(step, norms); });
}

void RunOutput::ended(std::int64_t step) {
  for_option(kOutputDir, [&] { metrics_->write_ended(step); });
}

void RunOutput::nonfinite(
    std::int64_t step,
    const std::string& what,
    std::int64_t last) {
  status_.clear();
  log_warning(
      "the gradient of step {} is not finite: {}; {}",
      step,
      what,
      last == step
          ? "the weights stay as they were"
          : fmt::format(
                "going on from the checkpoint of step {}, with new data",
                last));
  for_option(kOutputDir, [&] {
    if (last < step) {
      metrics_->mark_overtaken(last);
    }
    metrics_->write_nonfinite(step, what, last);
  });
}

void RunOutput::requested(
    const Requests& requests,
    std::int64_t step,
    bool saves) {
  if (!requests.save && requests.stop_signal == 0) {
    return;
  }
  status_.clear();
  if (requests.stop_signal != 0) {
    log_info(
        "{}: ending after step {}{}{}",
        stop_signal_name(requests.stop_signal),
        step,
        saves ? " with a checkpoint" : "",
        requests.stop_signal == SIGHUP ? "" : "; once more ends it at once");
  } else if (!saves) {
    log_warning("SIGUSR1: nothing is saved, since checkpoint.interval = 0");
  }
}

void RunOutput::graphs(std::int64_t step, const GraphStats& stats) {
  log_info("{}", to_string(stats));
  for_option(kOutputDir, [&] { metrics_->write_graphs(step, stats); });
}

void RunOutput::begin_progress(
    std::int64_t done,
    std::int64_t total,
    std::optional<double> planned_step_s) {
  status_.set_planned_step(planned_step_s.value_or(0));
  begin_ = std::chrono::steady_clock::now();
  first_ = done;
  total_ = total;
}

void RunOutput::progress(std::int64_t step, double loss) {
  const std::chrono::duration<double> elapsed =
      std::chrono::steady_clock::now() - begin_;
  status_.update(step, total_, loss, elapsed.count(), first_);
}

}  // namespace flatshard
