#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAStream.h>

#include "flatshard/device/device_backend.h"

#include <deque>
#include <utility>

namespace flatshard::detail {
namespace {

class CudaTimer : public StreamTimer {
 public:
  explicit CudaTimer(at::Device device) : device_(device) {}

  void start() override {
    if (used_ == pairs_.size()) {
      pairs_.emplace_back();
    }
    pairs_[used_].first.record(stream());
  }

  void stop() override { pairs_[used_++].second.record(stream()); }

  double wait_and_take_ms() override {
    double total = 0;
    for (std::size_t i = 0; i < used_; ++i) {
      pairs_[i].second.synchronize();
      total += pairs_[i].first.elapsed_time(pairs_[i].second);
    }
    used_ = 0;
    return total;
  }

 private:
  struct Pair {
    at::cuda::CUDAEvent first{cudaEventDefault};
    at::cuda::CUDAEvent second{cudaEventDefault};
  };

  c10::cuda::CUDAStream stream() const {
    return c10::cuda::getCurrentCUDAStream(device_.index());
  }

  at::Device device_;
  std::deque<Pair> pairs_;  // events do not move
  std::size_t used_ = 0;
};

}  // namespace

std::unique_ptr<StreamTimer> make_cuda_timer(at::Device device) {
  return std::make_unique<CudaTimer>(device);
}

}  // namespace flatshard::detail
