#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/group/param_group.h"

#include <vector>

namespace flatshard {

/// A norm, and the factor that clips to a limit.
struct GradNorm {
  at::Tensor norm;   ///< [] float32 on the device: the global gradient norm
  at::Tensor scale;  ///< [] float32: min(1, max_norm / (norm + 1e-6))
};

/// Returns the norm over all gradients of all ranks and the factor that scales
/// it to `max_norm`. Changes no gradient: pass the factor to Optimizer::step to
/// apply it. One collective over the mesh; queues on the current stream without
/// a host wait (CPU: blocks). Every element counts once, also if it is
/// replicated. Groups without a gradient count as zero.
///
/// @param groups    of one model; each may be on a part of its mesh.
/// @param max_norm  0 or less: only the norm is computed, and the factor is
///   undefined. Optimizer::step treats an undefined factor as 1.
[[nodiscard]] GradNorm grad_norm_and_scale(
    const std::vector<ParamGroup*>& groups,
    double max_norm);

}  // namespace flatshard
