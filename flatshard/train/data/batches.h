#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "flatshard/data/loader.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/models/config.h"
#include "flatshard/train/config.h"
#include "flatshard/train/data/token_buffers.h"

namespace flatshard {

/// How data.packing fills samples. The config is resolved.
data::PackingOptions packing_options(const Config& config);

/// The loader of data.train. The config is resolved.
/// @throws Error{config, io, format} naming data.train.
data::Loader open_train_loader(
    const Config& config,
    const models::ModelConfig& model);

/// This rank's part of each step, from the loader to the device: all of the
/// step's microbatches at once.
class Batches {
 public:
  /// @param loader  must outlive this.
  Batches(
      const Config& config,
      std::shared_ptr<Mesh> mesh,
      data::Loader& loader);

  std::int64_t num_microbatches() const { return num_microbatches_; }

  /// Reads the next step's sequences, queues their copies to the device on the
  /// current stream, and moves the loader on. Blocks the host while it reads
  /// and until the copies of the step before have run.
  /// @throws Error{format, io} naming data.train; the verdict on a rank that
  /// failed.
  void load_next();

  /// Of one microbatch: [local_batch_size, seq_len] int64 on the device, at the
  /// same address in each step.
  at::Tensor tokens(std::int64_t microbatch) const;
  at::Tensor targets(std::int64_t microbatch) const;

 private:
  std::shared_ptr<Mesh> mesh_;
  data::Loader& loader_;
  const std::int64_t local_batch_;
  const std::int64_t num_microbatches_;
  TokenBuffers buffers_;  ///< [microbatches, local_batch_size, seq_len]
};

}  // namespace flatshard
