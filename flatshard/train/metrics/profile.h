#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/diagnostics/step_profile.h"
#include "flatshard/train/metrics/host_operators.h"

#include <filesystem>
#include <string>
#include <vector>

namespace flatshard {

/// Records host and GPU activity between `start` and `stop` with torch's
/// profiler (Kineto). One per process at a time.
class TraceRecorder {
 public:
  explicit TraceRecorder(at::Device device) : device_(device) {}
  void start();
  /// Waits for the device and writes a Chrome trace, making its folder. Streams
  /// are named by their purpose.
  /// @return what ran on the GPU; empty without one.
  StepProfile stop(const std::filesystem::path& path);
  /// Returns the operators that used the host's time, ordered by their self
  /// time, after `stop`. Includes other threads only if torch's profiler tracks
  /// them: it tracks the thread of the backward, but not the queues of a CPU's
  /// streams.
  const std::vector<HostOperator>& host_operators() const {
    return host_operators_;
  }
  /// Ends the recording and writes nothing.
  void discard();

 private:
  at::Device device_;
  std::vector<HostOperator> host_operators_;
};

}  // namespace flatshard
