#include "flatshard/flight/recorder.h"

#include <exception>

#include "flatshard/comm/collective_scope.h"
#include "flatshard/comm/communicator.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/flight/watcher.h"

namespace flatshard {
namespace {

// A GPU whose peer died may fail with another text.
bool is_device_error(const std::string& message) {
  return message.find("CUDA error") != std::string::npos ||
         message.find("NCCL error") != std::string::npos;
}

void check_options(const FlightRecorderOptions& options) {
  FLATSHARD_CHECK(
      options.timeout >= std::chrono::milliseconds(100),
      config,
      "the watcher's timeout: expected at least 100 ms, got {} ms",
      options.timeout.count());
  FLATSHARD_CHECK(
      options.capacity >= 16,
      config,
      "the flight recorder's capacity: expected at least 16, got {}",
      options.capacity);
}

}  // namespace

class FlightRecorder::Impl : public detail::FlightWatcher {
 public:
  using FlightWatcher::FlightWatcher;

  /// See CollectiveScope::step. A number below 0 means the recorder's
  /// step.
  std::int64_t step_or_own(std::int64_t given) const {
    return given >= 0 ? given : step();
  }
};

FlightRecorder::FlightRecorder(
    int rank,
    int world,
    StoreHandle store,
    at::Device device,
    FlightRecorderOptions options) {
  check_options(options);
  FLATSHARD_CHECK(
      store && world > 1 && rank >= 0 && rank < world,
      usage,
      "a flight recorder: expected a store and rank < world with world > 1, "
      "got rank {} of {}",
      rank,
      world);
  impl_ = std::make_shared<Impl>(
      rank,
      world,
      std::move(store),
      device,
      std::move(options));
  impl_->start();
}

FlightRecorder::~FlightRecorder() {
  try {
    impl_->close(
        std::uncaught_exceptions() > 0
            ? std::optional<std::string>(
                  "it exited with an exception; see its own output")
            : std::nullopt);
  } catch (const std::exception& error) {
    log_error("the flight recorder ended badly: {}", error.what());
  }
}

int FlightRecorder::watch(
    const std::shared_ptr<Communicator>& communicator,
    std::string group) {
  impl_->add(communicator);
  return impl_->ring().add_track(
      std::move(group),
      communicator->name(),
      communicator->launch_order());
}

void FlightRecorder::set_step(std::int64_t step) {
  impl_->set_step(step);
}

void FlightRecorder::check() const {
  if (impl_->concluded()) {
    const Verdict verdict = *impl_->final_verdict();
    throw Error(verdict.code, verdict.text);
  }
}

void FlightRecorder::publish_failure(const std::string& message) {
  if (is_device_error(message)) {
    if (const auto verdict = impl_->await_verdict(message)) {
      throw Error(verdict->code, verdict->text);
    }
  }
  if (!impl_->concluded()) {
    impl_->propose(impl_->failure(message));
  }
}

std::shared_ptr<CapturedCollectives> FlightRecorder::make_captured() {
  return impl_->ring().make_captured();
}

void FlightRecorder::begin_capture(
    const std::shared_ptr<CapturedCollectives>& captured) {
  impl_->ring().begin_capture(captured);
}

void FlightRecorder::end_capture(bool failed) {
  impl_->ring().end_capture(failed);
}

void FlightRecorder::replayed(
    const std::shared_ptr<CapturedCollectives>& captured,
    std::int64_t step) {
  Event done;
  done.record(*current_stream(impl_->device()));
  impl_->ring().replayed(captured, impl_->step_or_own(step), std::move(done));
}

FlightRecorder::WithAbort FlightRecorder::with_abort(
    std::function<void()> action) {
  auto handle = std::make_shared<std::function<void()>>(std::move(action));
  impl_->add_with_abort(handle);
  return handle;
}

int FlightRecorder::rank() const {
  return impl_->rank();
}

std::optional<Verdict> FlightRecorder::verdict() const {
  return impl_->verdict();
}

FlightState FlightRecorder::state() const {
  return impl_->state(impl_->options().capacity);
}

std::chrono::milliseconds FlightRecorder::timeout() const {
  return impl_->options().timeout;
}

FlightRecorder::Ticket FlightRecorder::begin(
    int track,
    CollectiveSignature signature) {
  check();
  const CollectiveScope* scope = CollectiveScope::current();
  return impl_->ring().begin(
      track,
      std::move(signature),
      impl_->step_or_own(scope != nullptr ? scope->step() : -1));
}

void FlightRecorder::launched(Ticket ticket) {
  impl_->ring().launched(ticket);
}

void FlightRecorder::completed(Ticket ticket) {
  impl_->ring().completed(ticket);
}

Error FlightRecorder::explain(const Error& error) {
  if (error.code() != ErrorCode::comm && error.code() != ErrorCode::timeout) {
    return error;
  }
  const auto verdict = impl_->await_verdict(error.message());
  return verdict ? Error(verdict->code, verdict->text, error.context()) : error;
}

Error FlightRecorder::explain_difference(
    const std::string& text,
    const Communicator& communicator,
    std::int64_t seq,
    std::span<const IssuedCollective> issued) {
  const Verdict verdict = impl_->propose(
      verdict_on_difference(text, communicator.name(), seq, issued));
  return Error(verdict.code, verdict.text);
}

}  // namespace flatshard
