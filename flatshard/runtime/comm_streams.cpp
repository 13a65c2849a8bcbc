#include "flatshard/runtime/comm_streams.h"

namespace flatshard {

CommStreams::CommStreams(
    at::Device device,
    StreamOptions options,
    bool has_outer)
    : device_(device), exposed_(device) {
  options.high_priority = true;
  const auto next = [&](const char* name) {
    auto made = make_stream(device, name, options);
    options.delay_seed += 1;
    return made;
  };
  gather_ = next("gather");
  reduce_ = next("reduce");
  outer_ = has_outer ? next("outer") : nullptr;
}

void CommStreams::for_each(const std::function<void(Stream&)>& function) const {
  for (const auto& stream : {gather_, reduce_, outer_}) {
    if (stream != nullptr) {
      function(*stream);
    }
  }
}

void CommStreams::compute_waits(const Event& event) {
  if (!event.recorded()) {
    return;
  }
  const auto stream = compute();
  if (exposed_.measures_) {
    exposed_.timer_->start();
  }
  event.wait(*stream);
  if (exposed_.measures_) {
    exposed_.timer_->stop();
  }
}

void CommStreams::join() {
  const auto stream = compute();
  for_each([&](Stream& other) {
    Event queued;
    queued.record(other);
    queued.wait(*stream);
  });
}

void CommStreams::fork() {
  Event queued;
  queued.record(*compute());
  for_each([&](Stream& other) { queued.wait(other); });
}

void CommStreams::synchronize() {
  for_each([](Stream& stream) { stream.synchronize(); });
}

void CommStreams::synchronize_reductions() {
  for (const auto& stream : {reduce_, outer_}) {
    if (stream != nullptr) {
      stream->synchronize();
    }
  }
}

void CommStreams::reset() noexcept {
  for_each([](Stream& stream) { stream.reset(); });
}

}  // namespace flatshard
