#include "flatshard/train/metrics/step_meter.h"

namespace flatshard {

double StepMeter::ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin)
      .count();
}

void StepMeter::restart() {
  begin_ = Clock::now();
  num_steps_ = 0;
  all_ms_ = 0;
  data_ms_ = 0;
  wait_ms_ = 0;
}

void StepMeter::begin_step() {
  step_begin_ = Clock::now();
}

void StepMeter::end_step() {
  all_ms_ += ms_since(step_begin_);
  ++num_steps_;
}

void StepMeter::measure(StepMetrics& metrics) {
  const auto steps = static_cast<double>(num_steps_);
  step_ms_ = ms_since(begin_) / steps;
  metrics.step_ms = step_ms_;
  metrics.data_ms = data_ms_ / steps;
  metrics.host_ms = (all_ms_ - data_ms_ - wait_ms_) / steps;
  const double tokens_per_ms = static_cast<double>(work_.tokens) / step_ms_;
  metrics.tokens_per_s = tokens_per_ms * 1e3;
  metrics.tokens_per_s_per_rank = metrics.tokens_per_s / work_.num_ranks;
  const double flops = metrics.tokens_per_s_per_rank * work_.flops_per_token;
  metrics.tflops_per_rank = flops * 1e-12;
  if (work_.peak_flops) {
    metrics.mfu = flops / *work_.peak_flops;
  }
}

}  // namespace flatshard
