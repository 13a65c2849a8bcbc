#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "flatshard/device/memory.h"

namespace flatshard {

/// Copies pageable host memory to a device, after earlier work of the current
/// stream; blocks until it has arrived.
///
/// One copy of pageable memory is staged by one thread of the driver and fills
/// a small part of the link. So `num_threads` threads move pieces, on CUDA each
/// through two pinned buffers and a separate stream.
void upload(
    std::span<const BytesCopy> copies,
    at::Device device,
    int num_threads);

}  // namespace flatshard
