#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace flatshard {

/// Measures how long stretches of the compute stream last, without blocking the
/// host. CUDA: pairs of timing events on the current stream. CPU: the host's
/// clock.
class StreamTimer {
 public:
  virtual ~StreamTimer() = default;
  virtual void start() = 0;
  virtual void stop() = 0;
  /// Sum of all stretches since the last call; blocks until they are over.
  virtual double wait_and_take_ms() = 0;
};

std::unique_ptr<StreamTimer> make_stream_timer(at::Device device);

}  // namespace flatshard
