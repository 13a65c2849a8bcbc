#include "flatshard/train/run/run_output.h"

#include <unistd.h>

#include <csignal>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/core/output.h"
#include "flatshard/train/config/option_errors.h"
#include "flatshard/train/run/earlier_run.h"

namespace flatshard {
namespace {

void open_files(
    std::optional<MetricsFile>& metrics,
    std::optional<TensorboardLog>& tensorboard,
    const RunOutput::Options& options,
    MetricsFile::Mode mode,
    const StartMetrics& start) {
  const std::filesystem::path& folder = options.files.output_dir;
  save_config(folder, options.config);
  save_run_sources(folder, options.sources);
  metrics.emplace(folder / kRunMetrics, mode);
  if (mode == MetricsFile::Mode::append) {
    metrics->mark_overtaken(start.done);
  }
  metrics->write_start(start);
  if (options.tensorboard) {
    tensorboard.emplace(
        folder / kTensorboardFolder,
        metrics->attempt(),
        start.done);
  }
}

}  // namespace

void RunOutput::open(
    const Options& options,
    bool resumed,
    const StartMetrics& start) {
  for_option(kOutputDir, [&] {
    const auto open_as = [&](MetricsFile::Mode mode) {
      open_files(metrics_, tensorboard_, options, mode, start);
    };
    if (resumed) {
      open_as(MetricsFile::Mode::append);
      return;
    }
    const auto kept = keep_earlier_run(options.files);
    try {
      open_as(MetricsFile::Mode::truncate);
    } catch (...) {
      if (!kept.empty()) {
        restore_earlier_run(kept, options.files);
      }
      throw;
    }
    if (!kept.empty()) {
      log_info("kept the earlier run's files in {}", kept.string());
    }
  });
}

void RunOutput::print(const std::string& text) {
  status_.clear();
  write_output(STDOUT_FILENO, text + "\n");
}

void RunOutput::step(const StepMetrics& metrics) {
  print(format_step(metrics));
  last_loss_ = metrics.loss ? metrics.loss : last_loss_;
  for_option(kOutputDir, [&] {
    metrics_->write(metrics);
    if (tensorboard_) {
      tensorboard_->write(metrics);
    }
  });
}

void RunOutput::validation(const ValidationMetrics& metrics) {
  print(format_validation(metrics));
  for_option(kOutputDir, [&] {
    metrics_->write_validation(metrics);
    if (tensorboard_) {
      tensorboard_->write_validation(metrics);
    }
  });
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
                "resuming from the checkpoint of step {}, with new data",
                last));
  for_option(kOutputDir, [&] {
    if (last < step) {
      metrics_->mark_overtaken(last);
      if (tensorboard_) {
        tensorboard_->rewind(last);
      }
    }
    metrics_->write_nonfinite(step, what, last);
  });
}

void RunOutput::stopped_by_nonfinite(
    std::int64_t step,
    const std::string& what) {
  for_option(kOutputDir, [&] {
    metrics_->write_nonfinite(step, what, std::nullopt);
  });
}

void RunOutput::checkpoint(std::int64_t step, double seconds) {
  for_option(kOutputDir, [&] { metrics_->write_checkpoint(step, seconds); });
}

void RunOutput::checkpoint_error(std::int64_t step, const std::string& error) {
  try {
    metrics_->write_checkpoint_error(step, error);
  } catch (const Error& full) {
    // The disk that was full for the checkpoint may be full for this row, too.
    // The run continues without the checkpoint, so also without the row.
    log_warning("{}", full.message());
  }
}

void RunOutput::weights(
    std::int64_t step,
    double seconds,
    std::int64_t nbytes) {
  for_option(kOutputDir, [&] {
    metrics_->write_weights(step, seconds, nbytes);
  });
}

void RunOutput::weights_error(
    std::int64_t step,
    const std::string& error,
    std::int64_t failures) {
  for_option(kOutputDir, [&] {
    metrics_->write_weights_error(step, error, failures);
  });
}

void RunOutput::profile(std::int64_t step, const StepProfile& profile) {
  for_option(kOutputDir, [&] { metrics_->write_profile(step, profile); });
}

void RunOutput::profile(
    std::int64_t step,
    const std::vector<HostOperator>& operators) {
  for_option(kOutputDir, [&] { metrics_->write_profile(step, operators); });
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
  planned_step_s_ = planned_step_s;
  begin_ = std::chrono::steady_clock::now();
  first_ = done;
  total_ = total;
}

void RunOutput::progress(
    std::int64_t step,
    std::optional<double> loss,
    std::int64_t tokens) {
  const std::chrono::duration<double> elapsed =
      std::chrono::steady_clock::now() - begin_;
  const Progress progress{
      .done = step,
      .total = total_,
      .first = first_,
      .loss = loss ? loss : last_loss_,
      .tokens = tokens,
      .elapsed_s = elapsed.count(),
      .planned_step_s = planned_step_s_};
  if (status_.enabled()) {
    status_.update(progress);
    return;
  }
  const std::string line = time_left_.line(progress);
  if (!line.empty()) {
    log_info("{}", line);
  }
}

}  // namespace flatshard
