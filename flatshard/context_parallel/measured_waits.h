#pragma once

#include "flatshard/device/stream_word.h"
#include "flatshard/device/timer.h"

#include <c10/core/Device.h>

#include <memory>

namespace flatshard {

/// Measures how long compute waits for exchanges. Not in recorded CUDA graphs,
/// since their events have no times.
class MeasuredWaits {
 public:
  explicit MeasuredWaits(at::Device device)
      : device_(device), timer_(make_stream_timer(device)) {}

  void measure(bool measures) { measures_ = measures; }
  /// Returns the time measured since the last call, in ms. Blocks the host.
  double wait_and_take_ms() { return timer_->wait_and_take_ms(); }

  /// Runs `wait`, a wait of the current stream.
  template <class F>
  void run(F&& wait) {
    const bool measures = measures_ && !current_stream_records(device_);
    if (measures) {
      timer_->start();
    }
    wait();
    if (measures) {
      timer_->stop();
    }
  }

 private:
  at::Device device_;
  std::unique_ptr<StreamTimer> timer_;
  bool measures_ = false;
};

}  // namespace flatshard
