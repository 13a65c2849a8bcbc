#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "flatshard/train/metrics/metrics.h"

// Every number that a run reports of its steps and validations is one row.
// metrics.jsonl, TensorBoard's events, the printed lines and the charts of a
// report read the rows. A test compares docs/reference/log_and_metrics.md.
namespace flatshard {

/// Unset where a run has no such number.
using MetricValue = std::optional<std::variant<std::int64_t, double>>;

/// A metric as a line of a chart.
struct ChartLine {
  std::string_view chart;  ///< Chart::title
  std::string_view label;
  int color = 0;  ///< index in the page's palette; also the order in charts
  double scale = 1;
  bool is_rough = true;  ///< may be smoothed
};

/// A metric as a part of a printed line.
template <class Values>
struct PrintedPart {
  int place = 0;  ///< parts are in its order
  /// Empty text is left out.
  std::string (*text)(const Values&) = nullptr;
};

template <class Values>
struct Metric {
  std::string_view key;  ///< key in metrics.jsonl; "a.b" is b of the object a
  std::string_view help;
  MetricValue (*value)(const Values&);
  bool null_if_unset = false;  ///< otherwise the key is omitted
  std::string_view tag;        ///< TensorBoard tag; empty: none
  std::vector<ChartLine> lines = {};
  PrintedPart<Values> printed = {};
};

/// Returns the rows in the order of metrics.jsonl.
std::span<const Metric<StepMetrics>> step_metrics();
std::span<const Metric<ValidationMetrics>> validation_metrics();

/// Returns the parts of a printed line that have a text, in their order.
template <class Values>
std::string printed_parts(
    std::span<const Metric<Values>> metrics,
    const Values& values);

extern template std::string printed_parts(
    std::span<const Metric<StepMetrics>>,
    const StepMetrics&);
extern template std::string printed_parts(
    std::span<const Metric<ValidationMetrics>>,
    const ValidationMetrics&);

}  // namespace flatshard
