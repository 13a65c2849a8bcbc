#pragma once

#include "flatshard/plan/job.h"
#include "flatshard/train/plan/layer_kernels.h"

namespace flatshard {

/// Embedding and head, with the loss.
class EndsWork : LayerKernels {
 public:
  explicit EndsWork(const LayerKernels& kernels) : LayerKernels(kernels) {}

  plan::LayerWork work() const;
};

}  // namespace flatshard
