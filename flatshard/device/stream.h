#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace flatshard {

class Stream;

struct StreamOptions {
  /// CUDA: use a stream of the high-priority pool. CPU: no effect on order or
  /// result; worker threads have no priority.
  bool high_priority = false;
  /// Used by tests: a random delay of 0..max_delay_us microseconds before each
  /// submitted task (CPU: the worker sleeps, CUDA: a spinning kernel). Names,
  /// seeds and submission order decide the delays.
  std::uint64_t delay_seed = 0;
  int max_delay_us = 0;
};

/// A point in a stream's work. Copies share the point. Recording again makes
/// a new point: waits issued before keep the old one. An event that was never
/// recorded is complete.
class Event {
 public:
  /// A backend's state of one recorded point.
  class State {
   public:
    virtual ~State() = default;
    /// Blocks the host; throws the error of the stream that was recorded.
    virtual void synchronize() = 0;
    virtual bool query() = 0;
  };

  /// The point after all work submitted to `stream` so far. Never blocks.
  void record(Stream& stream);
  /// Later work of `waiter` starts after this point. Blocks the host only when
  /// `waiter` is the CPU compute stream, because the host runs its work.
  void wait(Stream& waiter) const;
  /// Blocks the host until the point is reached. Rethrows the first exception
  /// of the recorded stream if it was thrown before the point.
  void synchronize() const;
  /// Returns true when the point is reached; also when it was reached by an
  /// error.
  bool query() const;
  bool recorded() const { return state_ != nullptr; }

 private:
  std::shared_ptr<State> state_;
};

/// An ordered queue of work on one device.
///
/// CUDA: a stream of the caching allocator's pool. `submit` runs the function
/// at once on the calling thread with that stream current, so its launches are
/// queued. CPU: a worker thread runs the functions one after the other. In both
/// cases `submit` does not wait for the work.
///
/// The work runs with gradient mode off.
///
/// A CPU stream keeps the first exception of its work. Later work is skipped,
/// events recorded after it complete with the same exception, and
/// `synchronize` rethrows it until `reset`. On CUDA and on the CPU compute
/// stream an exception leaves `submit` directly.
class Stream {
 public:
  Stream(at::Device device, std::string name)
      : device_(device), name_(std::move(name)) {}
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  virtual void submit(std::function<void()> work) = 0;
  /// Blocks the host until all submitted work is done.
  virtual void synchronize() = 0;
  /// Blocks the host until all submitted work is done or skipped, and forgets
  /// a kept exception, so that the stream can be used again. Does not throw.
  virtual void reset() noexcept = 0;

  at::Device device() const { return device_; }
  const std::string& name() const { return name_; }

 protected:
  friend class Event;
  /// Returns the point after all submitted work; may reuse `previous`.
  virtual std::shared_ptr<Event::State> record(
      std::shared_ptr<Event::State> previous) = 0;
  virtual void wait(const std::shared_ptr<Event::State>& point) = 0;

 private:
  at::Device device_;
  std::string name_;
};

/// Returns a new stream on `device`. CUDA needs an index.
/// @throws Error{config} for CUDA in a build without it.
std::shared_ptr<Stream>
make_stream(at::Device device, std::string name, StreamOptions options = {});

/// Returns the compute stream. CUDA: wraps the stream that is current on this
/// thread at the time of the call. CPU: the calling thread itself: work runs at
/// once, events recorded on it are complete, waiting blocks the caller.
std::shared_ptr<Stream> current_stream(at::Device device);

/// Returns whether the calling thread runs the work of a CPU stream.
bool on_stream_thread();

/// Returns true when this build has CUDA and a GPU answers.
bool cuda_available();
/// Returns the number of GPUs; 0 without CUDA.
int num_cuda_devices();
/// Makes `device` current for the calling thread. No effect for the CPU.
void set_current_device(at::Device device);

}  // namespace flatshard
