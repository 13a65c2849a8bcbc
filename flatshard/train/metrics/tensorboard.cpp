#include "flatshard/train/metrics/tensorboard.h"

#include <chrono>

#include "flatshard/core/file_writer.h"
#include "flatshard/train/metrics/metric_table.h"

namespace flatshard {
namespace {

double now_s() {
  return std::chrono::duration<double>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

const std::filesystem::path& made(const std::filesystem::path& folder) {
  make_folder(folder);
  return folder;
}

/// Returns the metrics that have a tag and a value.
template <class Values>
EventFile::Scalars tagged_values(
    std::span<const Metric<Values>> metrics,
    const Values& values) {
  EventFile::Scalars tagged;
  for (const Metric<Values>& metric : metrics) {
    const MetricValue value = metric.value(values);
    if (value && !metric.tag.empty()) {
      std::visit(
          [&](auto number) {
            tagged.emplace_back(metric.tag, static_cast<double>(number));
          },
          *value);
    }
  }
  return tagged;
}

}  // namespace

TensorboardLog::TensorboardLog(
    const std::filesystem::path& folder,
    int attempt,
    std::int64_t done)
    : file_(made(folder), now_s(), attempt) {
  if (attempt > 1) {
    rewind(done);
  }
}

void TensorboardLog::rewind(std::int64_t step) {
  file_.restart(now_s(), step + 1);
}

void TensorboardLog::write(const StepMetrics& metrics) {
  file_.write(now_s(), metrics.step, tagged_values(step_metrics(), metrics));
}

void TensorboardLog::write_validation(const ValidationMetrics& metrics) {
  EventFile::Scalars values = tagged_values(validation_metrics(), metrics);
  for (const auto& [folder, loss] : metrics.parts) {
    values.emplace_back("validation/loss of " + folder, loss);
  }
  file_.write(now_s(), metrics.step, values);
}

}  // namespace flatshard
