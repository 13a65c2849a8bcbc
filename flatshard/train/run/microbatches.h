#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "flatshard/graphs/step_graph.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/models/llama.h"
#include "flatshard/overlap/overlap_runner.h"
#include "flatshard/runtime/runtime.h"
#include "flatshard/train/data/batches.h"

namespace flatshard {

/// Schedule of the microbatches of a step.
struct MicrobatchOptions {
  /// Runs as one StepGraph; see GraphOptions::whole_step.
  bool as_graph = false;
  /// Runs blocks in pieces. The Runtime's units are blocks; see OverlapRunner.
  std::optional<OverlapPlanOptions> overlap;
  /// Gets the numbers of each microbatch's samples before its forward, int64
  /// [local_batch_size] on the device; undefined: nothing reads them.
  at::Tensor samples;
};

/// Forward and backward of a step's microbatches: gradient accumulation.
class Microbatches {
 public:
  /// @param batches  must outlive this.
  Microbatches(
      models::Llama model,
      std::shared_ptr<Runtime> runtime,
      std::shared_ptr<Mesh> mesh,
      const Batches& batches,
      const MicrobatchOptions& options = {});
  Microbatches(const Microbatches&) = delete;
  Microbatches& operator=(const Microbatches&) = delete;

  /// Runs all microbatches that Batches has on the device. The last one's
  /// backward leaves the reduced gradients of the step's loss, the mean over
  /// all targets of all ranks that are not ignored. Queues on the current
  /// stream and the Runtime's streams. It reads no data and does not wait for
  /// the device, so all of it can be captured as one.
  /// @return this rank's part, [] float32 on the device: the mean over ranks
  ///   is the step's loss.
  /// @throws the verdict on a rank that failed.
  at::Tensor forward_backward();
  /// Returns the stats of regions, or of whole steps.
  GraphStats graph_stats() const;

 private:
  at::Tensor run();
  /// Returns the loss of a microbatch times its weight; see Batches.
  at::Tensor weighted(const at::Tensor& loss, std::int64_t microbatch) const;
  at::Tensor run_overlapped();
  OverlapModel pieces();

  models::Llama model_;
  at::Tensor samples_;
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<Mesh> mesh_;
  const Batches& batches_;
  std::unique_ptr<StepGraph> graph_;  ///< ends before the mesh
  std::unique_ptr<OverlapRunner> overlap_;
  std::vector<at::Tensor> losses_;  ///< of an overlapped step
};

}  // namespace flatshard
