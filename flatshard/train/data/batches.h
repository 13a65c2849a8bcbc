#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "flatshard/data/loader.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/train/data/data_options.h"
#include "flatshard/train/data/document_buffers.h"
#include "flatshard/train/data/token_buffers.h"

namespace flatshard {

/// Returns the loader of data.train.
/// @throws Error{config, io, format} naming data.train.
data::Loader open_train_loader(const DataOptions& options);

/// This rank's part of each step, from the loader to the device: all of the
/// step's microbatches at once. Ranks that share sequences (AxisRole) read the
/// same samples, and each keeps its part of their tokens.
class Batches {
 public:
  struct Options {
    std::int64_t local_batch_size = 1;
    data::PackingOptions packing;
    bool fixed_shapes = false;  ///< see DocumentBuffers::Options
    bool numbers_samples = false;
  };

  /// @param mesh    of the model or of its tokens (Mesh::token_mesh).
  /// @param loader  must outlive this.
  Batches(
      const Options& options,
      const std::shared_ptr<Mesh>& mesh,
      data::Loader& loader);

  std::int64_t num_microbatches() const { return num_microbatches_; }

  /// Reads the next step's sequences, queues their copies to the device on the
  /// current stream, and moves the loader on. Blocks the host while it reads
  /// and until the copies of the step before have run. Collective where targets
  /// may be ignored: a small all-reduce is queued then.
  /// @throws Error{format, io} naming data.train; the verdict on a rank that
  /// failed.
  void load_next();

  /// Returns whether the step's sequences, of all ranks, have a target with a
  /// loss. Otherwise their gradient is zero. The same on all ranks.
  bool has_targets() const { return has_targets_; }

  /// Returns this rank's tokens of one microbatch: [local_batch_size, seq_len /
  /// ranks that share sequences] int64 on the device, at the same address in
  /// each step.
  at::Tensor tokens(std::int64_t microbatch) const;
  at::Tensor targets(std::int64_t microbatch) const;
  /// Returns the documents of all tokens of a microbatch's samples. Undefined
  /// with data.packing = stream.
  nn::Documents documents(std::int64_t microbatch) const;
  /// Returns the factor of a microbatch's mean loss, float32 [] on the device:
  /// the targets of its samples over the mean of all microbatches of the step,
  /// of all ranks that read different samples. It makes the step's loss the
  /// mean over all targets. Undefined where no target is ignored: all factors
  /// would be 1.
  at::Tensor loss_weight(std::int64_t microbatch) const;
  /// Returns another factor of this rank's mean loss, float32 [] on the device:
  /// its targets over the mean of the ranks that share the microbatch's
  /// sequences. It makes the mean of these ranks' losses the mean over all
  /// targets. Undefined where all have equally many.
  at::Tensor target_share(std::int64_t microbatch) const;
  /// Returns the numbers of a microbatch's samples in the run, int64
  /// [local_batch_size] on the device. Undefined without numbers_samples.
  at::Tensor samples(std::int64_t microbatch) const;

 private:
  void read(std::span<std::int64_t> tokens, std::span<std::int64_t> targets);
  void queue_loss_weights();

  std::shared_ptr<Mesh> mesh_;  ///< ranks that read different samples
  const TokenPart part_;
  data::Loader& loader_;
  const std::int64_t local_batch_;
  const std::int64_t num_microbatches_;
  TokenBuffers buffers_;
  std::optional<DocumentBuffers> documents_;  ///< for packed documents
  at::Tensor offsets_, samples_;  ///< [microbatches, local_batch_size]
  bool has_targets_ = true;
  at::Tensor num_targets_;   ///< [microbatches] float64, pinned; or undefined
  at::Tensor loss_weights_;  ///< [microbatches] float32 on the device
  at::Tensor shares_host_;   ///< [microbatches] float32, pinned; or undefined
  at::Tensor shares_;        ///< the same on the device
};

}  // namespace flatshard
