#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/diagnostics/step_profile.h"
#include "flatshard/train/metrics/host_operators.h"

#include <filesystem>
#include <string>
#include <vector>

namespace flatshard {

/// Records what runs between `start` and `stop` on the host and the GPU with
/// torch's profiler (Kineto). One per process at a time.
class TraceRecorder {
 public:
  explicit TraceRecorder(at::Device device) : device_(device) {}
  void start();
  /// Waits for the device and writes a Chrome trace, making its folder. Streams
  /// are named by their purpose.
  /// @return what ran on the GPU; empty without one.
  StepProfile stop(const std::filesystem::path& path);
  /// Returns the operators that used the host's time, ordered by their self
  /// time, after `stop`. The work of other threads is among them as far as
  /// torch's profiler follows these: the backward is, the queues of a CPU's
  /// streams are not.
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
