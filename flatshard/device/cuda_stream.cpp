#include <ATen/core/grad_mode.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAMacros.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <mutex>
#include <typeinfo>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/device/capability.h"
#include "flatshard/device/cuda_scope.h"
#include "flatshard/device/device_backend.h"

namespace flatshard {
namespace {

// Spinning cycles per microsecond; a delay needs no better clock.
constexpr std::int64_t kCyclesPerUs = 1500;

// Turns torch's CUDA errors into Flatshard errors, without torch's backtrace.
template <class F>
auto with_cuda_errors(const std::string& where, F&& function) {
  try {
    return function();
  } catch (const c10::Error& error) {
    throw Error(ErrorCode::cuda, error.what_without_backtrace(), where);
  }
}

at::Device checked_device(at::Device device) {
  FLATSHARD_CHECK(
      cuda_available(),
      config,
      "device '{}': no GPU answers; use device cpu or look at nvidia-smi",
      device.str());
  const at::Device indexed =
      device.has_index() ? device
                         : at::Device(at::kCUDA, c10::cuda::current_device());
  FLATSHARD_CHECK(
      indexed.index() < num_cuda_devices(),
      config,
      "device '{}': expected an index below {} (GPUs that are visible)",
      indexed.str(),
      num_cuda_devices());
  check_gpu(indexed);
  return indexed;
}

// Unused events, per GPU: creating and destroying an event costs the host more
// time than recording it.
class FreeEvents {
 public:
  static FreeEvents& of(at::Device device) {
    // Never destroyed: static objects elsewhere may own events.
    static auto* const all =
        new std::array<FreeEvents, C10_COMPILE_TIME_MAX_GPUS>();
    return all->at(device.index());
  }

  cudaEvent_t take(at::Device device) {
    {
      const std::lock_guard lock(mutex_);
      if (!events_.empty()) {
        const cudaEvent_t event = events_.back();
        events_.pop_back();
        return event;
      }
    }
    const detail::CudaDeviceScope scope(device);
    cudaEvent_t event = nullptr;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }
  void give_back(cudaEvent_t event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
  }

 private:
  std::mutex mutex_;
  std::vector<cudaEvent_t> events_;
};

// Not at::cuda::CUDAEvent. It checks at each record and wait whether the stream
// is being captured: that adds half to the host time, and only events that are
// shared with other libraries' graphs need it.
class CudaEventState final : public Event::State {
 public:
  explicit CudaEventState(at::Device device)
      : device_(device), event_(with_cuda_errors("event", [&] {
          return FreeEvents::of(device).take(device);
        })) {}
  // Streams that wait for it keep the point that it had.
  ~CudaEventState() override { FreeEvents::of(device_).give_back(event_); }
  CudaEventState(const CudaEventState&) = delete;
  CudaEventState& operator=(const CudaEventState&) = delete;

  /// Returns `state` as one of these, null when it belongs to another backend.
  static CudaEventState* from(Event::State* state) {
    const bool is_cuda =
        state != nullptr && typeid(*state) == typeid(CudaEventState);
    return is_cuda ? static_cast<CudaEventState*>(state) : nullptr;
  }

  at::Device device() const { return device_; }
  void record(c10::cuda::CUDAStream stream) {
    const detail::CudaDeviceScope scope(stream.device());
    C10_CUDA_CHECK(cudaEventRecord(event_, stream));
  }
  void wait(c10::cuda::CUDAStream waiter) const {
    const detail::CudaDeviceScope scope(waiter.device());
    C10_CUDA_CHECK(cudaStreamWaitEvent(waiter, event_, 0));
  }

  void synchronize() override {
    with_cuda_errors("event", [&] {
      C10_CUDA_CHECK(cudaEventSynchronize(event_));
    });
  }
  bool query() override {
    // The flight recorder queries it on its own thread. It must not spoil a
    // graph that another thread captures.
    const c10::cuda::CUDAStreamCaptureModeGuard not_global{
        cudaStreamCaptureModeThreadLocal};
    return with_cuda_errors("event", [&] {
      const cudaError_t state = cudaEventQuery(event_);
      if (state == cudaErrorNotReady) {
        (void)cudaGetLastError();  // it stays there otherwise
        return false;
      }
      C10_CUDA_CHECK(state);
      return true;
    });
  }

 private:
  at::Device device_;
  cudaEvent_t event_;
};

class CudaStream : public Stream {
 public:
  CudaStream(
      c10::cuda::CUDAStream stream,
      std::string name,
      StreamOptions options)
      : Stream(stream.device(), std::move(name)),
        stream_(stream),
        options_(options) {}

  c10::cuda::CUDAStream cuda() const { return stream_; }

  void submit(std::function<void()> work) override {
    const at::NoGradGuard no_grad;
    const detail::CudaStreamScope scope(stream_);
    const int delay = detail::delay_us(name(), num_tasks_++, options_);
    if (delay > 0) {
      at::cuda::sleep(delay * kCyclesPerUs);
    }
    work();
  }

  void synchronize() override {
    with_cuda_errors(name(), [&] { stream_.synchronize(); });
  }

  void reset() noexcept override {
    try {
      stream_.synchronize();
    } catch (...) {  // a broken context stays broken and reports it at next use
    }
  }

 protected:
  std::shared_ptr<Event::State> record(
      std::shared_ptr<Event::State> previous) override {
    // Waits captured the old point when they were queued, so an event object
    // with one owner can be recorded again.
    auto* own = CudaEventState::from(previous.get());
    if (own == nullptr || previous.use_count() > 1 ||
        own->device() != device()) {
      auto fresh = std::make_shared<CudaEventState>(device());
      own = fresh.get();
      previous = std::move(fresh);
    }
    with_cuda_errors(name(), [&] { own->record(stream_); });
    return previous;
  }

  void wait(const std::shared_ptr<Event::State>& point) override {
    if (const auto* cuda = CudaEventState::from(point.get())) {
      with_cuda_errors(name(), [&] { cuda->wait(stream_); });
      return;
    }
    FLATSHARD_CHECK(
        point->query(),
        usage,
        "CUDA stream '{}' cannot wait for CPU work that is not done; "
        "synchronize the event on the host first",
        name());
    point->synchronize();  // done: returns at once or throws its error
  }

 private:
  c10::cuda::CUDAStream stream_;
  StreamOptions options_;
  std::uint64_t num_tasks_ = 0;
};

}  // namespace

bool cuda_available() {
  return num_cuda_devices() > 0;
}

int num_cuda_devices() {
  return c10::cuda::device_count();
}

namespace detail {

std::shared_ptr<Stream>
make_cuda_stream(at::Device device, std::string name, StreamOptions options) {
  const at::Device indexed = checked_device(device);
  return std::make_shared<CudaStream>(
      c10::cuda::getStreamFromPool(options.high_priority, indexed.index()),
      std::move(name),
      options);
}

std::shared_ptr<Stream> current_cuda_stream(at::Device device) {
  // Called several times per unit, and nearly always for the same stream.
  thread_local std::shared_ptr<CudaStream> last;
  const auto now =
      c10::cuda::getCurrentCUDAStream(checked_device(device).index());
  if (last == nullptr || last->cuda() != now) {
    last = std::make_shared<CudaStream>(now, "compute", StreamOptions{});
  }
  return last;
}

void set_current_cuda_device(at::Device device) {
  c10::cuda::set_device(checked_device(device).index());
}

}  // namespace detail
}  // namespace flatshard
