#include "flatshard/device/graph.h"

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/device/cuda_graph_audit.h"
#include "flatshard/device/cuda_scope.h"
#include "flatshard/device/device_backend.h"
#include "flatshard/device/graph_recording.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace flatshard::detail {
namespace {

// Returns the stream of all captures on one GPU: autograd runs a backward on
// the stream of its forward, and cuBLAS keeps a workspace for each stream that
// it has used.
c10::cuda::CUDAStream capture_stream(at::Device device) {
  static auto* const all = new std::
      array<std::optional<c10::cuda::CUDAStream>, C10_COMPILE_TIME_MAX_GPUS>();
  auto& stream = all->at(device.index());
  if (!stream) {
    stream = c10::cuda::getStreamFromPool(true, device.index());
  }
  return *stream;
}

// Returns where a replay reads the seed and offset of `generator`. In a
// recording.
std::vector<const void*> words_of_generator(at::Generator generator) {
  auto* const gpu = at::check_generator<at::CUDAGeneratorImpl>(generator);
  const std::lock_guard lock(gpu->mutex_);
  const at::PhiloxCudaState state = gpu->philox_cuda_state(0);
  if (!state.captured_) {
    return {};
  }
  return {state.seed_.ptr, state.offset_.ptr};
}

// Structs that kernels receive have uninitialized padding. It contains what was
// on the stack, such as addresses of other kernels. An audit cannot distinguish
// those from the kernel's own.
[[gnu::noinline]] void overwrite_stack() {
  constexpr std::size_t kNbytes = 256 * 1024;
  volatile unsigned char bytes[kNbytes];
  for (volatile unsigned char& byte : bytes) {
    byte = 0;
  }
}

// Overwrites the stack of the thread that runs backwards.
struct OverwriteStack : torch::autograd::Function<OverwriteStack> {
  static at::Tensor forward(
      torch::autograd::AutogradContext* /*ctx*/,
      const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* /*ctx*/,
      const torch::autograd::variable_list& grads) {
    overwrite_stack();
    return grads;
  }
};

// The capture stream's memory also contains the words that replays on other
// streams draw from. Work that is queued here must finish before the first of
// them.
void overwrite_stacks(at::Device device) {
  c10::cuda::device_synchronize();
  overwrite_stack();
  const at::AutoGradMode grad_mode(true);
  const at::Tensor x = at::ones({1}, at::device(device));
  OverwriteStack::apply(x.set_requires_grad(true)).backward();
  capture_stream(device).synchronize();
}

// A pool of torch's allocator. It exists while it has users, and cannot be used
// again after that. So it has users in addition to its graphs, because the
// first graph may fail.
class MemoryPool {
 public:
  explicit MemoryPool(at::Device device)
      : device_(device), id_(at::cuda::graph_pool_handle()) {
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    c10::cuda::CUDACachingAllocator::createOrIncrefPool(device_.index(), id_);
  }
  ~MemoryPool() {
    try {
      c10::cuda::CUDACachingAllocator::releasePool(device_.index(), id_);
    } catch (const std::exception& error) {
      log_warning("memory of CUDA graphs is not given back: {}", error.what());
    }
  }
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  at::cuda::MempoolId_t id() const { return id_; }

 private:
  at::Device device_;
  at::cuda::MempoolId_t id_;
};

class CudaGraph final : public DeviceGraph {
 public:
  CudaGraph(
      at::Device device,
      std::shared_ptr<MemoryPool> pool,
      const Work& work,
      const std::vector<at::Generator>& generators,
      bool audited)
      : device_(device),
        pool_(std::move(pool)),
        audited_(audited),
        recording_(audited) {
    const c10::cuda::CUDAStreamGuard on(capture_stream(device));
    if (audited_) {
      overwrite_stacks(device);
    }
    for (const at::Generator& generator : generators) {
      recording_.draws_from(generator);
    }
    recording_.begin(pool_->id());
    try {
      if (audited_) {
        find_generators(generators);
      }
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

  GraphAudit audit(const std::vector<at::Tensor>& declared) const override {
    FLATSHARD_CHECK(
        audited_,
        usage,
        "audit of a CUDA graph: expected one of a pool that was made for "
        "audits (make_graph_pool)");
    GraphMemory memory;
    void* const stream = capture_stream(device_).stream();
    for (const auto& segment :
         c10::cuda::CUDACachingAllocator::snapshot().segments) {
      if (segment.device != device_.index()) {
        continue;
      }
      std::uint64_t begin = segment.address;
      for (const auto& block : segment.blocks) {
        if (block.allocated) {  // free blocks have no owner
          memory.add_managed(begin, block.size);
        }
        begin += block.size;
      }
      // Outside the pool that stream only has the workspace of cuBLAS.
      if (segment.owner_private_pool_id == pool_->id() ||
          segment.stream == stream) {
        memory.allow(segment.address, segment.total_size);
      }
    }
    for (const void* word : generator_words_) {
      memory.allow(reinterpret_cast<std::uint64_t>(word), sizeof(std::int64_t));
    }
    for (const at::Tensor& tensor : declared) {
      if (tensor.defined() && tensor.is_cuda()) {
        memory.allow(
            reinterpret_cast<std::uint64_t>(tensor.const_data_ptr()),
            at::detail::computeStorageNbytes(
                tensor.sizes(),
                tensor.strides(),
                tensor.element_size()));
      }
    }
    return audit_graph(recording_.raw_cuda_graph(), memory);
  }

 private:
  void find_generators(const std::vector<at::Generator>& generators) {
    generator_words_ = words_of_generator(
        at::cuda::detail::getDefaultCUDAGenerator(device_.index()));
    for (const at::Generator& generator : generators) {
      if (generator.device().is_cuda()) {
        for (const void* word : words_of_generator(generator)) {
          generator_words_.push_back(word);
        }
      }
    }
  }

  at::Device device_;
  std::shared_ptr<MemoryPool> pool_;  // outlives the recording
  bool audited_;
  mutable GraphRecording recording_;  // torch's getter is not const
  std::vector<const void*> generator_words_;
  std::vector<at::Tensor> outputs_;
};

class CudaGraphPool final : public GraphPool {
 public:
  CudaGraphPool(at::Device device, bool audited)
      : device_(device),
        memory_(std::make_shared<MemoryPool>(device)),
        audited_(audited) {}

  std::unique_ptr<DeviceGraph> capture(
      DeviceGraph::Work work,
      const std::vector<at::Generator>& generators) override {
    warm_up();
    const std::int64_t before = reserved();
    try {
      auto graph = std::make_unique<CudaGraph>(
          device_,
          memory_,
          work,
          generators,
          audited_);
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
  // matmul. If it came out of the pool, the pool would exist as long as the
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
  std::shared_ptr<MemoryPool> memory_;
  bool audited_;
  std::int64_t nbytes_ = 0;
  bool warm_ = false;
};

}  // namespace

std::shared_ptr<GraphPool> make_cuda_graph_pool(
    at::Device device,
    bool audited) {
  return std::make_shared<CudaGraphPool>(device, audited);
}

}  // namespace flatshard::detail
