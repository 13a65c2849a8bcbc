#pragma once

#include <span>
#include <string>
#include <string_view>

namespace flatshard {

/// A chart of a report. Metrics name it (metric_table.h).
struct Chart {
  std::string_view title;
  std::string_view unit;
  bool is_wide = false;
  bool has_zero = false;     ///< the y axis starts at 0
  bool has_log = false;      ///< offers a log scale
  bool has_events = false;   ///< shows checkpoints and gradients not finite
  bool settles = false;      ///< the first steps of a long run may be clipped
  bool counts = false;       ///< numbers have letters: 12.3K
  std::string_view without;  ///< no chart for runs that have this metric
  /// Also a line for each metric whose key starts with this prefix.
  std::string_view parts;
  /// A key of the config, or a metric and its label, as a line across.
  std::string_view reference_key;
  std::string_view reference_metric;
  std::string_view reference_label;
};

/// Returns the charts in the order of the page.
std::span<const Chart> charts();

/// Returns the charts with their lines as JSON, as page.js of `report` draws
/// them.
std::string charts_json();

}  // namespace flatshard
