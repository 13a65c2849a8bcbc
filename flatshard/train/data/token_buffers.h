#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "flatshard/device/stream.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/mesh/token_part.h"

namespace flatshard {

/// Tokens and targets of the sequences of some microbatches: of all of them in
/// host memory, pinned where there is a GPU, and of this rank's run of each
/// microbatch on the device. The device's tensors keep their addresses.
class TokenBuffers {
 public:
  struct Options {
    std::int64_t num_microbatches = 1;
    std::int64_t rows = 1;  ///< per microbatch
    std::int64_t seq_len = 0;
    TokenPart part;  ///< of this rank; all ranks divide seq_len
  };
  /// Writes tokens and targets of all sequences, one after the other.
  using Fill =
      std::function<void(std::span<std::int64_t>, std::span<std::int64_t>)>;

  TokenBuffers(std::shared_ptr<Mesh> mesh, const Options& options);

  /// Has `fill` write the host's buffers and queues their copies to the device
  /// on the current stream. Blocks the host until the copies of the load before
  /// have run. @throws what `fill` throws; the verdict on a rank that failed.
  void load(const Fill& fill);

  /// Returns a microbatch on the device: this rank's part of its tokens, as
  /// [rows, seq_len / part.num_parts()] int64.
  at::Tensor tokens(std::int64_t microbatch) const;
  at::Tensor targets(std::int64_t microbatch) const;

 private:
  void queue_copy(const at::Tensor& from, at::Tensor& to) const;

  std::shared_ptr<Mesh> mesh_;
  const Options options_;
  at::Tensor tokens_host_;  ///< [microbatches, rows * seq_len]
  at::Tensor targets_host_;
  Event copied_;       ///< from the two above
  at::Tensor tokens_;  ///< [microbatches, rows, seq_len / part.num_parts()]
  at::Tensor targets_;
};

}  // namespace flatshard
