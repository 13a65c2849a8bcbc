#pragma once

#include <string>

#include "flatshard/train/metrics/status_line.h"

namespace flatshard {

/// The remaining time of a run, logged once a minute: for output that is not a
/// terminal, because it has no StatusLine.
class TimeLeft {
 public:
  /// Returns the line; empty when the last one is less than a minute ago, and
  /// after the last step.
  std::string line(const Progress& progress);

 private:
  double last_s_ = 0;
};

/// Returns the estimated seconds of the remaining steps; 0 before the first.
double seconds_left(const Progress& progress);

}  // namespace flatshard
