#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "flatshard/group/float8_outputs.h"
#include "flatshard/optim/update_step.h"

namespace flatshard {

/// A run of the flat shard whose elements share their weight decay.
struct DecayRange {
  std::int64_t end = 0;  ///< first element after the run
  float weight_decay = 0;

  bool operator==(const DecayRange&) const = default;
};

/// One optimizer update of one flat shard: reads main weights, gradient and
/// state, writes main weights, compute weights and state in one pass.
struct FlatUpdate {
  at::Tensor main;     ///< [n] weights that are updated
  at::Tensor compute;  ///< [n] rounded copy; undefined when main serves
  at::Tensor grad;     ///< [n] any float dtype
  at::Tensor state0;   ///< [n] float32: exp_avg, or momentum (may be undefined)
  at::Tensor state1;   ///< [n] float32: exp_avg_sq (AdamW)
  /// [] float32 on the same device, multiplied into the gradient; undefined
  /// for 1. A device value, so clipping needs no host wait.
  at::Tensor grad_scale;
  /// Ascending and complete: the last `end` is n.
  std::vector<DecayRange> decay;
  /// CUDA with several ranges: their ends [r] int64 and decays [r] float32.
  at::Tensor device_ends;
  at::Tensor device_decays;
  Float8Outputs float8;  ///< AdamW only
};

/// AdamW with decoupled weight decay, arXiv:1711.05101 (algorithm 2):
///   w -= lr * decay * w;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
///   w -= lr * (m / c1) / (sqrt(v / c2) + eps)
/// Queues on the current CUDA stream, or runs on the host. float32 arithmetic.
void adamw_update(const FlatUpdate& update, const AdamWStep& step);

/// SGD with momentum and decoupled weight decay:
///   w -= lr * decay * w;  u = momentum u + g;  w -= lr * u
void sgd_update(const FlatUpdate& update, const SgdStep& step);

// The CUDA halves; in a build without CUDA they throw Error{config}.
void adamw_update_cuda(const FlatUpdate& update, const AdamWStep& step);
void sgd_update_cuda(const FlatUpdate& update, const SgdStep& step);

}  // namespace flatshard
