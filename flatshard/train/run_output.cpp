#include "flatshard/train/run_output.h"

#include <cstdio>

#include "flatshard/core/log.h"
#include "flatshard/train/option_errors.h"

namespace flatshard {
namespace {

void open(
    std::optional<MetricsFile>& metrics,
    const Config& config,
    bool resumed) {
  const std::filesystem::path folder = config.run.output_dir;
  if (resumed) {
    save_config(config);
    metrics.emplace(folder / "metrics.jsonl", MetricsFile::Mode::append);
    return;
  }
  const auto kept = keep_earlier_run(folder, config.checkpoint.folder);
  try {
    save_config(config);
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

RunOutput::RunOutput(const Config& config, bool resumed) {
  for_option(kOutputDir, [&] { open(metrics_, config, resumed); });
}

void RunOutput::print(const std::string& text) {
  status_.clear();
  fmt::print("{}\n", text);
  std::fflush(stdout);
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
  for_option(kOutputDir, [&] { metrics_->write_nonfinite(step, what, last); });
}

}  // namespace flatshard
