#pragma once

#include "flatshard/device/stream.h"
#include "flatshard/device/timer.h"

#include <functional>
#include <memory>

namespace flatshard {

/// How long compute waits for all-gathers and reductions; two timing events per
/// wait on a GPU. Off at first.
class ExposedWaits {
 public:
  explicit ExposedWaits(at::Device device)
      : timer_(make_stream_timer(device)) {}

  void measure(bool measures) { measures_ = measures; }
  bool measures() const { return measures_; }
  /// Returns the measured waits since the last call. Blocks the host.
  double wait_and_take_ms() { return timer_->wait_and_take_ms(); }

 private:
  friend class CommStreams;
  std::unique_ptr<StreamTimer> timer_;
  bool measures_ = false;
};

/// The streams that a Runtime uses for all-gathers and reductions, each a
/// separate queue next to compute. So none waits for another without an Event.
/// Several Runtimes may share them.
class CommStreams {
 public:
  /// @param has_outer  some gradients are reduced over an outer axis too (HSDP,
  ///   HFSDP); its slow network must not delay the reductions of the inner one.
  CommStreams(at::Device device, StreamOptions options, bool has_outer);

  const std::shared_ptr<Stream>& gather() const { return gather_; }
  const std::shared_ptr<Stream>& reduce() const { return reduce_; }
  /// Returns null without an outer axis.
  const std::shared_ptr<Stream>& outer() const { return outer_; }
  /// Returns the stream of the calling thread.
  std::shared_ptr<Stream> compute() const { return current_stream(device_); }

  /// Makes compute's next work wait for `event`.
  void compute_waits(const Event& event);
  ExposedWaits& exposed() { return exposed_; }

  /// Makes compute's next work wait for all that these have queued.
  void join();
  /// Makes the next work of these wait for all that compute has queued.
  void fork();
  /// Blocks until all their work is done.
  void synchronize();
  /// The same, only for the reductions.
  void synchronize_reductions();
  /// Blocks as well, and discards exceptions of their work.
  void reset() noexcept;

 private:
  void for_each(const std::function<void(Stream&)>& function) const;

  at::Device device_;
  std::shared_ptr<Stream> gather_;
  std::shared_ptr<Stream> reduce_;
  std::shared_ptr<Stream> outer_;
  ExposedWaits exposed_;
};

}  // namespace flatshard
