#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace flatshard {

/// Bytes of one device's memory.
struct MemoryStats {
  std::int64_t allocated_bytes = 0;       ///< allocated by tensors in use
  std::int64_t peak_allocated_bytes = 0;  ///< highest since the last reset
  std::int64_t reserved_bytes = 0;        ///< allocated on the device
  std::int64_t peak_reserved_bytes = 0;
  std::int64_t capacity_bytes = 0;  ///< of the device or machine
};

/// CUDA: torch's caching allocator and the bytes given to
/// count_memory_outside_allocator. Memory of NCCL and the driver is in
/// neither. CPU: the resident set of the process from /proc (allocated =
/// reserved = now, peak = its high-water mark, not resettable); zeros where
/// /proc is missing.
MemoryStats memory_stats(at::Device device);

/// Host memory for large copies and direct I/O: [nbytes] uint8, page-aligned
/// and of exactly that size, zero at first. When `device` is a GPU it is
/// pinned, so that copies from and to that device run in parallel with its
/// kernels.
///
/// The process owns the pages, not the driver, because the kernel does no
/// direct I/O from driver memory.
/// @throws Error{memory} when the machine cannot provide it.
at::Tensor host_buffer(std::int64_t nbytes, at::Device device);

/// Copies between two places of `device`, of peers whose memory is mapped
/// there, or of pinned host memory. CUDA: queued on the current stream, for a
/// copy engine where that can reach both. CPU: done on return.
void copy_bytes(
    void* to,
    const void* from,
    std::int64_t nbytes,
    at::Device device);

struct BytesCopy {
  void* to = nullptr;
  const void* from = nullptr;
  std::int64_t nbytes = 0;
};

/// The same for many that may run in any order: what one of them writes, no
/// other one reads or writes. CUDA 13 on: a single call of the driver. A
/// captured graph cannot contain that call.
void copy_bytes(std::span<const BytesCopy> copies, at::Device device);

/// Keeps the memory of `tensor` from reuse until the queued work of the current
/// stream ends, even if another stream allocated it. CUDA only.
void keep_for_current_stream(const at::Tensor& tensor);

/// `nbytes` more (or, negative, fewer) are allocated on a GPU outside its
/// allocator: memory_stats adds them.
void count_memory_outside_allocator(at::Device device, std::int64_t nbytes);

}  // namespace flatshard
