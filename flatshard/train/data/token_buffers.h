#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "flatshard/device/stream.h"
#include "flatshard/mesh/mesh.h"

namespace flatshard {

/// Tokens and targets of some sequences in host memory, pinned where there is a
/// GPU, and on the device. The device's tensors keep their addresses.
class TokenBuffers {
 public:
  /// Writes tokens and targets, row-major in the shape of the buffers.
  using Fill =
      std::function<void(std::span<std::int64_t>, std::span<std::int64_t>)>;

  /// @param shape  of tokens and of targets, int64 each.
  TokenBuffers(std::shared_ptr<Mesh> mesh, at::IntArrayRef shape);

  /// Has `fill` write the host's buffers and queues their copies to the device
  /// on the current stream. Blocks the host until the copies of the load before
  /// have run. @throws what `fill` throws; the verdict on a rank that failed.
  void load(const Fill& fill);

  /// Tokens on the device.
  const at::Tensor& tokens() const { return tokens_; }
  const at::Tensor& targets() const { return targets_; }

 private:
  std::shared_ptr<Mesh> mesh_;
  at::Tensor tokens_host_;
  at::Tensor targets_host_;
  Event copied_;  ///< from the two above
  at::Tensor tokens_;
  at::Tensor targets_;
};

}  // namespace flatshard
