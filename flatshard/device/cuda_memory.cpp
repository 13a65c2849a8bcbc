#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include "flatshard/core/error.h"
#include "flatshard/device/backend.h"

namespace flatshard::detail {

MemoryStats cuda_memory_stats(at::Device device) {
  at::globalContext().lazyInitDevice(at::kCUDA);  // the caching allocator
  const c10::cuda::CUDAGuard guard(device);
  const auto index = c10::cuda::current_device();
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  const cudaError_t status = cudaMemGetInfo(&free_bytes, &total_bytes);
  FLATSHARD_CHECK(
      status == cudaSuccess,
      cuda,
      "device '{}': {}",
      device.str(),
      cudaGetErrorString(status));
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(index);
  const auto& allocated = stats.allocated_bytes[0];  // 0: all pools together
  const auto& reserved = stats.reserved_bytes[0];
  return {
      .allocated_bytes = allocated.current,
      .peak_allocated_bytes = allocated.peak,
      .reserved_bytes = reserved.current,
      .peak_reserved_bytes = reserved.peak,
      .capacity_bytes = static_cast<std::int64_t>(total_bytes)};
}

void reset_cuda_peak_memory(at::Device device) {
  at::globalContext().lazyInitDevice(at::kCUDA);
  const c10::cuda::CUDAGuard guard(device);
  c10::cuda::CUDACachingAllocator::resetPeakStats(c10::cuda::current_device());
}

bool pin_host_memory(void* begin, std::size_t nbytes) {
  at::globalContext().lazyInitDevice(at::kCUDA);
  const cudaError_t status =
      cudaHostRegister(begin, nbytes, cudaHostRegisterPortable);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // it is told by the caller
  }
  return status == cudaSuccess;
}

void unpin_host_memory(void* begin) noexcept {
  static_cast<void>(cudaHostUnregister(begin));
}

}  // namespace flatshard::detail
