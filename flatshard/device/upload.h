#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
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

/// Most bytes of one TensorFill.
inline constexpr std::int64_t kMaxFillNbytes = 8 << 20;

/// A part of a tensor, and where its values come from.
struct TensorFill {
  at::Tensor to;  ///< [n] contiguous
  /// Dtype of the values that are read. The device converts them.
  at::ScalarType dtype = at::kFloat;
  /// Writes n values of `dtype`. Runs on any of the threads.
  std::function<void(std::span<std::byte>)> read;
};

/// Reads values and copies them to a device, after earlier work of the current
/// stream; blocks until they have arrived. Each of `num_threads` threads reads
/// a part while its previous one is copied.
void fill_tensors(
    std::span<const TensorFill> fills,
    at::Device device,
    int num_threads);

/// Returns how many threads a rank uses to read and upload, if `num_ranks`
/// ranks share the cores.
int num_upload_threads(int num_ranks);

}  // namespace flatshard
