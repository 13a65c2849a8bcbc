#pragma once

#include <chrono>

#include "flatshard/train/metrics/metrics.h"

namespace flatshard {

/// Measures a start: the parts of the time until the first step has ended.
class StartClock {
 public:
  /// Ends the part `program_s`.
  /// @param by_launcher  the parent of this process is the program's first.
  explicit StartClock(bool by_launcher);

  /// Ends a part. It started when the previous one ended.
  void end(double StartTimes::*part);
  const StartTimes& times() const { return times_; }

 private:
  std::chrono::steady_clock::time_point begin_;  ///< of the current part
  StartTimes times_;
};

}  // namespace flatshard
