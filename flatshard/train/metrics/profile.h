#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/diagnostics/step_profile.h"

#include <filesystem>
#include <string>

namespace flatshard {

/// Records what runs between `start` and `stop` on the host and the GPU with
/// torch's profiler (Kineto). One per process at a time.
class TraceRecorder {
 public:
  explicit TraceRecorder(at::Device device) : device_(device) {}
  void start();
  /// Waits for the device and writes a Chrome trace, making its folder. Streams
  /// are named after what they are there for.
  /// @return what ran on the GPU; empty without one.
  StepProfile stop(const std::filesystem::path& path);
  /// After `stop`: a line for each operator that took the host's time, the
  /// longest first, with its own time (without the operators that it called)
  /// and how often it ran. What other threads did is in it as far as torch's
  /// profiler follows them: the backward is, the queues of a CPU's streams not.
  const std::string& host_table() const { return host_table_; }
  /// Ends the recording and writes nothing.
  void discard();

 private:
  at::Device device_;
  std::string host_table_;
};

}  // namespace flatshard
