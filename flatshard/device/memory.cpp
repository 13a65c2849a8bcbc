#include "flatshard/device/memory.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "flatshard/core/error.h"
#include "flatshard/device/device_backend.h"

namespace flatshard {
namespace {

// "VmHWM:     1234 kB" -> bytes; 0 when the key is not there.
std::int64_t status_bytes(const std::string& key) {
  std::ifstream file("/proc/self/status");
  std::string line;
  while (std::getline(file, line)) {
    if (line.starts_with(key)) {
      std::istringstream text(line.substr(key.size()));
      std::int64_t kib = 0;
      text >> kib;
      return kib * 1024;
    }
  }
  return 0;
}

MemoryStats process_memory_stats() {
  const std::int64_t now = status_bytes("VmRSS:");
  const std::int64_t peak = status_bytes("VmHWM:");
  return {
      .allocated_bytes = now,
      .peak_allocated_bytes = peak,
      .reserved_bytes = now,
      .peak_reserved_bytes = peak,
      .capacity_bytes = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) *
                        sysconf(_SC_PAGESIZE)};
}

}  // namespace

MemoryStats memory_stats(at::Device device) {
  FLATSHARD_CHECK(
      device.is_cpu() || device.is_cuda(),
      config,
      "memory statistics: expected a device of type cpu or cuda, got '{}'",
      device.str());
  return device.is_cpu() ? process_memory_stats()
                         : detail::cuda_memory_stats(device);
}

at::Tensor host_buffer(std::int64_t nbytes, at::Device device) {
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(nbytes, 1));
  void* begin = ::mmap(
      nullptr,
      size,
      PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS,
      -1,
      0);
  FLATSHARD_CHECK(
      begin != MAP_FAILED,
      memory,
      "cannot get {} bytes of host memory: {}",
      nbytes,
      std::strerror(errno));
  ::madvise(begin, size, MADV_HUGEPAGE);  // faster to pin; a wish only
  const bool pinned = device.is_cuda();
  if (pinned && !detail::pin_host_memory(begin, size)) {
    ::munmap(begin, size);
    FLATSHARD_THROW(
        memory,
        "cannot pin {} bytes of host memory; the machine may lack it, or allow "
        "less (ulimit -l)",
        nbytes);
  }
  return at::from_blob(
      begin,
      {nbytes},
      [size, pinned](void* memory) {
        if (pinned) {
          detail::unpin_host_memory(memory);
        }
        ::munmap(memory, size);
      },
      at::TensorOptions().dtype(at::kByte));
}

void copy_bytes(
    void* to,
    const void* from,
    std::int64_t nbytes,
    at::Device device) {
  const auto size = static_cast<std::size_t>(nbytes);
  if (device.is_cuda()) {
    detail::copy_cuda_bytes(to, from, size, device);
  } else if (size > 0) {
    std::memcpy(to, from, size);
  }
}

void copy_bytes(std::span<const BytesCopy> copies, at::Device device) {
  if (device.is_cuda()) {
    detail::copy_cuda_bytes(copies, device);
    return;
  }
  for (const BytesCopy& copy : copies) {
    copy_bytes(copy.to, copy.from, copy.nbytes, device);
  }
}

void count_memory_outside_allocator(at::Device device, std::int64_t nbytes) {
  if (device.is_cuda()) {
    detail::count_cuda_memory_outside(device, nbytes);
  }
}

void keep_for_current_stream(const at::Tensor& tensor) {
  if (tensor.is_cuda()) {
    tensor.record_stream(
        c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(tensor.device()));
  }
}

}  // namespace flatshard
