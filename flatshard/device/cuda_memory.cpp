#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/device/cuda_scope.h"
#include "flatshard/device/device_backend.h"

namespace flatshard::detail {

namespace {

std::mutex outside_mutex;
std::map<at::DeviceIndex, std::int64_t> outside_nbytes;  // the allocator

std::int64_t outside_allocator(at::DeviceIndex device) {
  const std::lock_guard lock(outside_mutex);
  return outside_nbytes[device];
}

}  // namespace

void count_cuda_memory_outside(at::Device device, std::int64_t nbytes) {
  const std::lock_guard lock(outside_mutex);
  outside_nbytes[device.index()] += nbytes;
}

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
  // Allocated from a run's start to its end, so part of every peak.
  const std::int64_t outside = outside_allocator(index);
  return {
      .allocated_bytes = allocated.current + outside,
      .peak_allocated_bytes = allocated.peak + outside,
      .reserved_bytes = reserved.current + outside,
      .peak_reserved_bytes = reserved.peak + outside,
      .capacity_bytes = static_cast<std::int64_t>(total_bytes)};
}

void copy_cuda_bytes(
    void* to,
    const void* from,
    std::size_t nbytes,
    at::Device device) {
  const CudaDeviceScope scope(device);
  C10_CUDA_CHECK(cudaMemcpyAsync(
      to,
      from,
      nbytes,
      cudaMemcpyDefault,
      c10::cuda::getCurrentCUDAStream(device.index())));
}

void copy_cuda_bytes(std::span<const BytesCopy> copies, at::Device device) {
  const CudaDeviceScope scope(device);
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
#if CUDART_VERSION >= 13000
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<std::size_t> sizes;
  to.reserve(copies.size());
  from.reserve(copies.size());
  sizes.reserve(copies.size());
  for (const BytesCopy& copy : copies) {
    if (copy.nbytes > 0) {
      to.push_back(copy.to);
      from.push_back(copy.from);
      sizes.push_back(static_cast<std::size_t>(copy.nbytes));
    }
  }
  if (to.empty()) {
    return;
  }
  // The stream that all others wait for does not accept batches.
  if (stream.stream() != nullptr) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;  // from this copy on
    C10_CUDA_CHECK(cudaMemcpyBatchAsync(
        to.data(),
        from.data(),
        sizes.data(),
        to.size(),
        &attributes,
        &first,
        1,
        stream));
    return;
  }
#endif
  for (const BytesCopy& copy : copies) {
    copy_cuda_bytes(
        copy.to,
        copy.from,
        static_cast<std::size_t>(copy.nbytes),
        device);
  }
}

bool pin_host_memory(void* begin, std::size_t nbytes) {
  at::globalContext().lazyInitDevice(at::kCUDA);
  const cudaError_t status =
      cudaHostRegister(begin, nbytes, cudaHostRegisterPortable);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // the caller reports it
  }
  return status == cudaSuccess;
}

void unpin_host_memory(void* begin) noexcept {
  static_cast<void>(cudaHostUnregister(begin));
}

}  // namespace flatshard::detail
