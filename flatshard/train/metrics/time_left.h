#pragma once

#include <string>

#include "flatshard/train/metrics/status_line.h"

namespace flatshard {

/// The time that a run still takes, as a line of the log once a minute: for
/// output that is no terminal, where there is no StatusLine.
class TimeLeft {
 public:
  /// Returns the line; empty when the last one is less than a minute ago, and
  /// after the last step.
  std::string line(const Progress& progress);

 private:
  double last_s_ = 0;
};

/// Returns the seconds that the rest of the steps takes; 0 before the first.
double seconds_left(const Progress& progress);

}  // namespace flatshard
