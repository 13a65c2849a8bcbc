#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "flatshard/mesh/mesh.h"
#include "flatshard/models/llama.h"
#include "flatshard/train/batches.h"
#include "flatshard/unit/runtime.h"
#include "flatshard/unit/step_graph.h"

namespace flatshard {

/// Forward and backward of a step's microbatches: gradient accumulation.
class Microbatches {
 public:
  /// @param batches  must outlive this.
  /// @param as_graph  as one StepGraph; see GraphOptions::whole_step.
  Microbatches(
      models::Llama model,
      std::shared_ptr<Runtime> runtime,
      std::shared_ptr<Mesh> mesh,
      const Batches& batches,
      bool as_graph = false);
  Microbatches(const Microbatches&) = delete;
  Microbatches& operator=(const Microbatches&) = delete;

  /// Runs all microbatches that Batches has on the device; the last one's
  /// backward leaves the reduced gradients of the step's mean loss. Queues on
  /// the current stream and those of the Runtime. It reads no data and does not
  /// wait for the device, so all of it can be captured as one.
  /// @return this rank's mean loss, [] float32 on the device.
  /// @throws the verdict on a rank that failed.
  at::Tensor forward_backward();
  /// Of regions, or of whole steps.
  GraphStats graph_stats() const;

 private:
  at::Tensor run();

  models::Llama model_;
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<Mesh> mesh_;
  const Batches& batches_;
  std::unique_ptr<StepGraph> graph_;  ///< ends before the mesh
};

}  // namespace flatshard
