#include "flatshard/train/metrics/metrics.h"

#include <fmt/format.h>

#include <cmath>

#include "flatshard/train/metrics/metric_table.h"

namespace flatshard {

std::string format_step(const StepMetrics& metrics) {
  return fmt::format(
      "step: {}{}  {}",
      metrics.step,
      metrics.steps > 0 ? fmt::format("/{}", metrics.steps) : "",
      printed_parts(step_metrics(), metrics));
}

double ValidationMetrics::perplexity() const {
  return std::exp(loss);
}

std::string format_validation(const ValidationMetrics& metrics) {
  return fmt::format(
      "step: {}  {}",
      metrics.step,
      printed_parts(validation_metrics(), metrics));
}

}  // namespace flatshard
