#include "flatshard/core/error.h"
#include "flatshard/device/cuda_driver.h"
#include "flatshard/device/cuda_scope.h"
#include "flatshard/device/device_backend.h"
#include "flatshard/device/stream_word.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <mutex>
#include <vector>

namespace flatshard::detail {
namespace {

// Host memory that all GPUs reach. It is never freed: freeing waits for the
// device and would block after a fault.
class FreeWords {
 public:
  static FreeWords& all() {
    static auto* const words = new FreeWords;
    return *words;
  }

  std::uint32_t* take() {
    const std::lock_guard lock(mutex_);
    if (words_.empty()) {
      constexpr std::size_t kNumWords = 64;
      constexpr std::size_t kStride = 16;  // each has a cache line
      void* page = nullptr;
      C10_CUDA_CHECK(cudaHostAlloc(
          &page,
          kNumWords * kStride * sizeof(std::uint32_t),
          cudaHostAllocMapped | cudaHostAllocPortable));
      for (std::size_t i = 0; i < kNumWords; ++i) {
        words_.push_back(static_cast<std::uint32_t*>(page) + i * kStride);
      }
    }
    std::uint32_t* const word = words_.back();
    words_.pop_back();
    return word;
  }
  void give_back(std::uint32_t* word) {
    const std::lock_guard lock(mutex_);
    words_.push_back(word);
  }

 private:
  std::mutex mutex_;
  std::vector<std::uint32_t*> words_;
};

class CudaWord final : public StreamWord {
 public:
  explicit CudaWord(at::Device device) : device_(device) {
    const CudaDeviceScope scope(device_);
    word_ = FreeWords::all().take();
    std::atomic_ref(*word_).store(0);
    void* there = nullptr;
    C10_CUDA_CHECK(cudaHostGetDevicePointer(&there, word_, 0));
    address_ = reinterpret_cast<CUdeviceptr>(there);
    FLATSHARD_CHECK(
        run_ != nullptr,
        cuda,
        "the driver has no cuStreamBatchMemOp; it is older than CUDA 12");
  }
  ~CudaWord() override { FreeWords::all().give_back(word_); }
  CudaWord(const CudaWord&) = delete;
  CudaWord& operator=(const CudaWord&) = delete;

  void write(std::uint32_t value) override {
    const CudaDeviceScope scope(device_);
    CUstreamBatchMemOpParams operation{};
    operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    operation.writeValue.address = address_;
    operation.writeValue.value = value;
    operation.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    const CUresult status = run_(
        c10::cuda::getCurrentCUDAStream(device_.index()).stream(),
        1,
        &operation,
        0);
    FLATSHARD_CHECK(
        status == CUDA_SUCCESS,
        cuda,
        "a number that a stream writes: the driver refused it with error {}",
        static_cast<int>(status));
  }

  std::uint32_t read() const override {
    return std::atomic_ref(*word_).load(std::memory_order_acquire);
  }

 private:
  at::Device device_;
  std::uint32_t* word_ = nullptr;
  CUdeviceptr address_ = 0;
  StreamBatchMemOp run_ = find_stream_batch_mem_op();
};

}  // namespace

std::unique_ptr<StreamWord> make_cuda_stream_word(at::Device device) {
  return std::make_unique<CudaWord>(device);
}

bool current_cuda_stream_records(at::Device device) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(
      c10::cuda::getCurrentCUDAStream(device.index()),
      &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace flatshard::detail
