#pragma once

#include <c10/util/ScopeExit.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "flatshard/train/metrics/metrics.h"

namespace flatshard {

/// Breakdown of the host time of this rank between two log lines, and the
/// throughput.
class StepMeter {
 public:
  /// The work of a step.
  struct Work {
    std::int64_t tokens = 0;  ///< over all ranks
    int num_ranks = 1;
    double flops_per_token = 0;
    std::optional<double> peak_flops;  ///< per rank and second, if known
  };

  explicit StepMeter(const Work& work) : work_(work) {}

  /// Resets all statistics.
  void restart();
  void begin_step();
  void end_step();

  /// Runs `work` as a step's wait for data.
  template <class F>
  decltype(auto) data(F&& work) {
    return timed(data_ms_, std::forward<F>(work));
  }
  /// Runs `work` and does not count its wait for the device as host time.
  template <class F>
  decltype(auto) device_wait(F&& work) {
    return timed(wait_ms_, std::forward<F>(work));
  }

  /// Fills in the times, the tokens and the FLOP/s of the steps since the
  /// restart, their mean. At least one has ended.
  void measure(StepMetrics& metrics);
  /// Returns a step's time as last measured; 0 before.
  double step_ms() const { return step_ms_; }

 private:
  using Clock = std::chrono::steady_clock;

  static double ms_since(Clock::time_point begin);

  /// Adds the time of `work` to a sum, also when it throws.
  template <class F>
  static decltype(auto) timed(double& sum_ms, F&& work) {
    const Clock::time_point begin = Clock::now();
    const auto end = c10::make_scope_exit([&] { sum_ms += ms_since(begin); });
    return std::forward<F>(work)();
  }

  const Work work_;
  Clock::time_point begin_ = Clock::now();
  Clock::time_point step_begin_;
  std::int64_t num_steps_ = 0;
  double all_ms_ = 0;  ///< from begin_step to end_step
  double data_ms_ = 0;
  double wait_ms_ = 0;
  double step_ms_ = 0;
};

}  // namespace flatshard
