#include "flatshard/device/timer.h"

#include "flatshard/device/device_backend.h"

#include <chrono>

namespace flatshard {
namespace {

class HostTimer : public StreamTimer {
 public:
  void start() override { begin_ = Clock::now(); }
  void stop() override { total_ += Clock::now() - begin_; }
  double wait_and_take_ms() override {
    const double ms = std::chrono::duration<double, std::milli>(total_).count();
    total_ = {};
    return ms;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_;
  Clock::duration total_{};
};

}  // namespace

std::unique_ptr<StreamTimer> make_stream_timer(at::Device device) {
  if (device.is_cuda()) {
    return detail::make_cuda_timer(device);
  }
  return std::make_unique<HostTimer>();
}

}  // namespace flatshard
