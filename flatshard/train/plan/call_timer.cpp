#include "flatshard/train/plan/call_timer.h"

#include "flatshard/device/timer.h"

#include <algorithm>
#include <cmath>

namespace flatshard {
namespace {

constexpr int kWarmup = 2;
constexpr int kLeastCalls = 3;
constexpr int kMostCalls = 12;

}  // namespace

CallTimer::CallTimer(at::Device device, double seconds)
    : device_(device), seconds_(seconds) {
  if (device.is_cuda()) {
    constexpr std::int64_t kSize = 8192;
    left_ = normal_bf16(device, {kSize / 2, kSize});
    right_ = normal_bf16(device, {kSize, kSize});
    out_ = at::empty_like(left_);
  }
}

double CallTimer::operator()(const std::function<void()>& call) const {
  const auto timer = make_stream_timer(device_);
  const auto time = [&](int calls) {
    for (int i = 0; i < calls; ++i) {
      if (out_.defined()) {
        at::Tensor out = out_;
        at::mm_out(out, left_, right_);
      }
      timer->start();
      call();
      timer->stop();
    }
    return 1e-3 * timer->wait_and_take_ms() / calls;
  };
  for (int i = 0; i < kWarmup; ++i) {
    call();
  }
  const double one = std::max(time(1), 1e-7);
  return time(static_cast<int>(std::clamp(
      std::ceil(seconds_ / one),
      static_cast<double>(kLeastCalls),
      static_cast<double>(kMostCalls))));
}

double seconds_in_a_row(
    at::Device device,
    int calls,
    const std::function<void()>& call) {
  for (int i = 0; i < kWarmup; ++i) {
    call();
  }
  const auto timer = make_stream_timer(device);
  timer->start();
  for (int i = 0; i < calls; ++i) {
    call();
  }
  timer->stop();
  return 1e-3 * timer->wait_and_take_ms() / calls;
}

at::Tensor normal_bf16(at::Device device, std::vector<std::int64_t> shape) {
  return at::randn(shape, at::TensorOptions(device).dtype(at::kBFloat16));
}

}  // namespace flatshard
