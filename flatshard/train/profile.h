#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/diagnostics/step_profile.h"

#include <filesystem>

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
  /// Ends the recording and writes nothing.
  void discard();

 private:
  at::Device device_;
};

}  // namespace flatshard
