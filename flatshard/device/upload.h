#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace flatshard {

/// Where values that are in host memory belong.
struct HostCopy {
  void* to = nullptr;  ///< memory of the device
  const void* from = nullptr;
  std::int64_t nbytes = 0;
};

/// Copies pageable host memory to a device, after what is queued on the current
/// stream; blocks until it is there.
///
/// One copy of pageable memory is staged by one thread of the driver and fills
/// a small part of the link. So `num_threads` threads move pieces, on CUDA each
/// through two pinned buffers and a stream of its own.
void upload(
    std::span<const HostCopy> copies,
    at::Device device,
    int num_threads);

}  // namespace flatshard
