#include "flatshard/device/graph.h"

#include "flatshard/core/error.h"
#include "flatshard/device/backend.h"
#include "flatshard/device/cuda_scope.h"
#include "flatshard/device/graph_recording.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <array>
#include <optional>
#include <utility>

namespace flatshard::detail {
namespace {

// The stream of all captures on one GPU: autograd runs a backward on the stream
// of its forward, and cuBLAS keeps a workspace for each stream it has seen.
c10::cuda::CUDAStream capture_stream(at::Device device) {
  static auto* const all = new std::
      array<std::optional<c10::cuda::CUDAStream>, C10_COMPILE_TIME_MAX_GPUS>();
  auto& stream = all->at(device.index());
  if (!stream) {
    stream = c10::cuda::getStreamFromPool(true, device.index());
  }
  return *stream;
}

class CudaGraph final : public DeviceGraph {
 public:
  CudaGraph(
      at::Device device,
      at::cuda::MempoolId_t pool,
      const Work& work,
      const std::vector<at::Generator>& generators)
      : device_(device) {
    const c10::cuda::CUDAStreamGuard on(capture_stream(device));
    for (const at::Generator& generator : generators) {
      recording_.draws_from(generator);
    }
    recording_.begin(pool);
    try {
      outputs_ = work();
    } catch (...) {
      recording_.give_up();
      throw;
    }
    recording_.end();
  }

  const std::vector<at::Tensor>& outputs() const override { return outputs_; }

  void replay() override {
    const c10::cuda::CUDAGuard guard(device_);
    recording_.replay();
  }

 private:
  at::Device device_;
  GraphRecording recording_;
  std::vector<at::Tensor> outputs_;
};

class CudaGraphPool final : public GraphPool {
 public:
  explicit CudaGraphPool(at::Device device)
      : device_(device), id_(at::cuda::graph_pool_handle()) {}

  std::unique_ptr<DeviceGraph> capture(
      DeviceGraph::Work work,
      const std::vector<at::Generator>& generators) override {
    warm_up();
    const std::int64_t before = reserved();
    try {
      auto graph = std::make_unique<CudaGraph>(device_, id_, work, generators);
      nbytes_ += reserved() - before;
      return graph;
    } catch (const c10::Error& error) {
      throw Error(ErrorCode::cuda, error.what_without_backtrace(), "capture");
    }
  }

  void make_room() override { c10::cuda::CUDACachingAllocator::emptyCache(); }

  std::int64_t nbytes() const override { return nbytes_; }

 private:
  std::int64_t reserved() const { return memory_stats(device_).reserved_bytes; }

  // cuBLAS allocates a workspace for each thread and stream at their first
  // product. Had it come out of the pool, the pool would live as long as the
  // process.
  void warm_up() {
    if (std::exchange(warm_, true)) {
      return;
    }
    const c10::cuda::CUDAStreamGuard on(capture_stream(device_));
    const at::AutoGradMode grad_mode(true);
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const at::Tensor a = at::ones({16, 16}, at::device(device_).dtype(dtype))
                               .set_requires_grad(true);
      at::mm(a, a).sum().backward();
    }
    capture_stream(device_).synchronize();
  }

  at::Device device_;
  at::cuda::MempoolId_t id_;
  std::int64_t nbytes_ = 0;
  bool warm_ = false;
};

}  // namespace

std::shared_ptr<GraphPool> make_cuda_graph_pool(at::Device device) {
  return std::make_shared<CudaGraphPool>(device);
}

}  // namespace flatshard::detail
