#include <ATen/core/grad_mode.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "flatshard/core/error.h"
#include "flatshard/device/backend.h"

namespace flatshard {
namespace {

// Spinning cycles per microsecond; a delay needs no better clock.
constexpr std::int64_t kCyclesPerUs = 1500;

// Turns torch's CUDA errors into ours, without its backtrace.
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
  return indexed;
}

// Not at::cuda::CUDAEvent, which asks at each record and wait whether the
// stream is being captured: that takes the host half as long again, and only
// events that are shared with other libraries' graphs need it.
class CudaEventState : public Event::State {
 public:
  explicit CudaEventState(at::Device device) : device_(device) {
    with_cuda_errors("event", [&] {
      const c10::cuda::CUDAGuard guard(device);
      C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    });
  }
  ~CudaEventState() override {
    try {
      const c10::cuda::CUDAGuard guard(device_);
      C10_CUDA_CHECK_WARN(cudaEventDestroy(event_));
    } catch (...) {  // the context is gone, and the event with it
    }
  }

  at::Device device() const { return device_; }
  void record(c10::cuda::CUDAStream stream) {
    const c10::cuda::CUDAGuard guard(stream.device());
    C10_CUDA_CHECK(cudaEventRecord(event_, stream));
  }
  void wait(c10::cuda::CUDAStream waiter) const {
    const c10::cuda::CUDAGuard guard(waiter.device());
    C10_CUDA_CHECK(cudaStreamWaitEvent(waiter, event_, 0));
  }

  void synchronize() override {
    with_cuda_errors("event", [&] {
      C10_CUDA_CHECK(cudaEventSynchronize(event_));
    });
  }
  bool query() override {
    // The flight recorder asks from its own thread, which must not spoil a
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
  cudaEvent_t event_ = nullptr;
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

  void submit(std::function<void()> work) override {
    const at::NoGradGuard no_grad;
    const c10::cuda::CUDAStreamGuard guard(stream_);
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
    } catch (...) {  // a broken context stays broken and says so at next use
    }
  }

 protected:
  std::shared_ptr<Event::State> record(
      std::shared_ptr<Event::State> previous) override {
    // Waits captured the old point when they were queued, so an event object
    // with one owner can be recorded again.
    auto state = std::dynamic_pointer_cast<CudaEventState>(previous);
    previous.reset();
    if (!state || state.use_count() > 1 || state->device() != device()) {
      state = std::make_shared<CudaEventState>(device());
    }
    with_cuda_errors(name(), [&] { state->record(stream_); });
    return state;
  }

  void wait(const std::shared_ptr<Event::State>& point) override {
    if (auto* cuda = dynamic_cast<CudaEventState*>(point.get())) {
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
  const at::Device indexed = checked_device(device);
  return std::make_shared<CudaStream>(
      c10::cuda::getCurrentCUDAStream(indexed.index()),
      "compute",
      StreamOptions{});
}

void set_current_cuda_device(at::Device device) {
  c10::cuda::set_device(checked_device(device).index());
}

}  // namespace detail
}  // namespace flatshard
