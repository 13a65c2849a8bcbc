#include "flatshard/train/metrics/metric_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "flatshard/train/metrics/number_text.h"

namespace flatshard {
namespace {

/// A function of the metrics `m`.
#define OF(Result, Values, ...) \
  [](const Values& m) -> Result { return __VA_ARGS__; }
/// A function of a part `m` of a step's metrics. The result is empty without
/// the part.
#define OF_PART(Result, Part, part, ...)           \
  [](const StepMetrics& step) -> Result {          \
    const auto of = OF(Result, Part, __VA_ARGS__); \
    return step.part ? of(*step.part) : Result();  \
  }
#define ROW(function, name, text, ...) \
  {.key = name, .help = text, .value = function __VA_OPT__(, ) __VA_ARGS__},

std::string memory_text(const StepMetrics& m) {
  const double share = m.memory_total_bytes > 0
                           ? 100.0 *
                                 static_cast<double>(m.memory_reserved_bytes) /
                                 static_cast<double>(m.memory_total_bytes)
                           : 0.0;
  return fmt::format(
      "memory: {:.2f}GiB({:.2f}%)",
      static_cast<double>(m.memory_reserved_bytes) / kGiB,
      share);
}

std::string speed_text(const StepMetrics& m) {
  const auto all = std::llround(m.tokens_per_s);
  const auto each = std::llround(m.tokens_per_s_per_rank);
  return fmt::format(
      "tps: {}{}",
      with_commas(all),
      all == each ? "" : fmt::format(" ({}/rank)", with_commas(each)));
}

std::string start_text(const StepMetrics& m) {
  if (!m.start_times) {
    return "";
  }
  const StartTimes& t = *m.start_times;
  return fmt::format(
      "start: {:.1f}s (program {:.1f}, device {:.1f}, ranks {:.1f}, model "
      "{:.1f}, weights {:.1f}, step {:.1f})",
      t.total_s(),
      t.program_s,
      t.device_s,
      t.ranks_s,
      t.model_s,
      t.weights_s,
      t.step_s);
}

std::string flops_text(const StepMetrics& m) {
  // A small model on a CPU has thousandths of a TFLOP/s.
  constexpr double kTwoDigitsShow = 0.1;
  return m.tflops_per_rank < kTwoDigitsShow
             ? fmt::format("tflops: {:.2g}", m.tflops_per_rank)
             : fmt::format("tflops: {:.2f}", m.tflops_per_rank);
}

const Metric<StepMetrics> kStepMetrics[] = {
#define METRIC(type, member, ...) \
  ROW(OF(MetricValue, StepMetrics, m.member), __VA_ARGS__)
#define TEXT(...) OF(std::string, StepMetrics, __VA_ARGS__)
#include "flatshard/train/metrics/rows/step.def"

#define METRIC(type, member, ...) DERIVED(m.member, __VA_ARGS__)
#define DERIVED(value, ...) \
  ROW(OF_PART(MetricValue, StartTimes, start_times, value), __VA_ARGS__)
#include "flatshard/train/metrics/rows/start.def"

#define METRIC(type, member, ...) \
  ROW(OF_PART(MetricValue, ExpertMetrics, experts, m.member), __VA_ARGS__)
#define TEXT(...) OF_PART(std::string, ExpertMetrics, experts, __VA_ARGS__)
#include "flatshard/train/metrics/rows/experts.def"
};

const Metric<ValidationMetrics> kValidationMetrics[] = {
#define METRIC(type, member, ...) DERIVED(m.member, __VA_ARGS__)
#define DERIVED(value, ...) \
  ROW(OF(MetricValue, ValidationMetrics, value), __VA_ARGS__)
#define TEXT(...) OF(std::string, ValidationMetrics, __VA_ARGS__)
#include "flatshard/train/metrics/rows/validation.def"
};

}  // namespace

std::span<const Metric<StepMetrics>> step_metrics() {
  return kStepMetrics;
}

std::span<const Metric<ValidationMetrics>> validation_metrics() {
  return kValidationMetrics;
}

template <class Values>
std::string printed_parts(
    std::span<const Metric<Values>> metrics,
    const Values& values) {
  std::vector<std::pair<int, std::string>> parts;
  for (const Metric<Values>& metric : metrics) {
    if (metric.printed.text != nullptr) {
      parts.emplace_back(metric.printed.place, metric.printed.text(values));
    }
  }
  std::ranges::sort(parts);
  std::vector<std::string> texts;
  for (auto& [place, text] : parts) {
    if (!text.empty()) {
      texts.push_back(std::move(text));
    }
  }
  return fmt::to_string(fmt::join(texts, "  "));
}

template std::string printed_parts(
    std::span<const Metric<StepMetrics>>,
    const StepMetrics&);
template std::string printed_parts(
    std::span<const Metric<ValidationMetrics>>,
    const ValidationMetrics&);

}  // namespace flatshard
