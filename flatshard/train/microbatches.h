#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "flatshard/mesh/mesh.h"
#include "flatshard/models/llama.h"
#include "flatshard/train/batches.h"
#include "flatshard/unit/runtime.h"

namespace flatshard {

/// Forward and backward of a step's microbatches: gradient accumulation.
class Microbatches {
 public:
  /// @param batches  must outlive this.
  Microbatches(
      models::Llama model,
      std::shared_ptr<Runtime> runtime,
      std::shared_ptr<Mesh> mesh,
      const Batches& batches);

  /// Runs all microbatches that Batches has on the device; the last one's
  /// backward leaves the reduced gradients of the step's mean loss. Queues on
  /// the current stream and those of the Runtime. It reads no data and does not
  /// wait for the device, so all of it can be captured as one.
  /// @return this rank's mean loss, [] float32 on the device.
  /// @throws the verdict on a rank that failed.
  at::Tensor forward_backward();

 private:
  models::Llama model_;
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<Mesh> mesh_;
  const Batches& batches_;
};

}  // namespace flatshard
