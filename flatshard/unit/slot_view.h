#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace flatshard {

/// Memory that a unit's weights or gradients have for a while: a Slot for its
/// readers and writers. Owns nothing; the Executor does.
struct SlotView {
  void* data = nullptr;
  std::int64_t nbytes = 0;
  at::Device device = at::kCPU;

  explicit operator bool() const { return data != nullptr; }
  void* at(std::int64_t offset) const {
    return static_cast<char*>(data) + offset;
  }
  /// [sizes] contiguous, from byte `offset` on. Shares the memory and does not
  /// keep it.
  at::Tensor tensor(
      std::int64_t offset,
      at::IntArrayRef sizes,
      at::ScalarType dtype) const;
};

}  // namespace flatshard
