#include "flatshard/device/stream.h"

#include "flatshard/core/error.h"
#include "flatshard/core/philox.h"
#include "flatshard/device/device_backend.h"

namespace flatshard {

void Event::record(Stream& stream) {
  state_ = stream.record(std::move(state_));
}

void Event::wait(Stream& waiter) const {
  if (state_) {
    waiter.wait(state_);
  }
}

void Event::synchronize() const {
  if (state_) {
    state_->synchronize();
  }
}

bool Event::query() const {
  return !state_ || state_->query();
}

namespace {

void check_supported(at::Device device) {
  FLATSHARD_CHECK(
      device.is_cpu() || device.is_cuda(),
      config,
      "expected a device of type cpu or cuda, got '{}'",
      device.str());
}

}  // namespace

std::shared_ptr<Stream>
make_stream(at::Device device, std::string name, StreamOptions options) {
  check_supported(device);
  FLATSHARD_CHECK(
      options.max_delay_us >= 0,
      config,
      "stream '{}': expected max_delay_us >= 0, got {}",
      name,
      options.max_delay_us);
  return device.is_cpu()
             ? detail::make_cpu_stream(std::move(name), options)
             : detail::make_cuda_stream(device, std::move(name), options);
}

std::shared_ptr<Stream> current_stream(at::Device device) {
  check_supported(device);
  return device.is_cpu() ? detail::caller_stream()
                         : detail::current_cuda_stream(device);
}

bool on_stream_thread() {
  return detail::on_cpu_stream_thread();
}

void set_current_device(at::Device device) {
  check_supported(device);
  if (device.is_cuda()) {
    detail::set_current_cuda_device(device);
  }
}

int detail::delay_us(
    const std::string& stream,
    std::uint64_t task,
    const StreamOptions& options) {
  if (options.max_delay_us == 0) {
    return 0;
  }
  const Philox draw(mix_keys(options.delay_seed, stable_hash(stream)));
  const auto range = static_cast<std::uint32_t>(options.max_delay_us) + 1;
  return static_cast<int>(draw(task)[0] % range);
}

}  // namespace flatshard
