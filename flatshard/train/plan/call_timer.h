#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace flatshard {

/// Measures calls as a training step runs them. On a GPU, a large untimed
/// matmul runs before each call: it evicts the call's operands from the cache,
/// and keeps the GPU at the clock to which its power limits it.
class CallTimer {
 public:
  /// @param seconds  how long calls are measured at least, within limits.
  CallTimer(at::Device device, double seconds);

  /// Returns the mean seconds of a call, after a warm-up.
  double operator()(const std::function<void()>& call) const;
  at::Device device() const { return device_; }

 private:
  at::Device device_;
  double seconds_;
  at::Tensor left_, right_, out_;  ///< of the matmul; undefined on a CPU
};

/// Returns the seconds of one of `calls` calls that follow each other, after a
/// warm-up.
double seconds_in_a_row(
    at::Device device,
    int calls,
    const std::function<void()>& call);

/// Returns bfloat16 numbers as in training: power, and so clocks, depend on
/// them.
at::Tensor normal_bf16(at::Device device, std::vector<std::int64_t> shape);

}  // namespace flatshard
