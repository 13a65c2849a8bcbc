#pragma once

#include "flatshard/plan/job.h"
#include "flatshard/train/plan/layer_kernels.h"
#include "flatshard/train/plan/stages.h"

#include <cstdint>

namespace flatshard {

/// Attention of a block, from its norm to its output.
class AttentionWork : LayerKernels {
 public:
  explicit AttentionWork(const LayerKernels& kernels) : LayerKernels(kernels) {}

  Stages stages() const;

  /// Returns the bytes of its output and log-sum-exp, where a recompute does
  /// not run attention again. saved_nbytes has them, too.
  std::int64_t kept_nbytes() const;
  /// Returns the bytes of input, rotated queries and keys, values, result, its
  /// log-sum-exp, and the divisor of the norm.
  std::int64_t saved_nbytes() const;
  /// Returns the bytes of keys and values of all hosts in the backward of
  /// attention: all-gathered, and their gradients in float32. The exchange of
  /// these needs as much.
  std::int64_t gathered_nbytes() const;

 private:
  /// Returns the width of the keys of a token that a rank sends to the ranks of
  /// context parallelism: each gets a head.
  std::int64_t exchanged_kv() const;
  void exchange_heads(plan::Kernels& to, double nbytes) const;
  /// Keys and values of a rank's heads. Attention that is stored needs them in
  /// its backward only.
  void gather_over_hosts(plan::Kernels& to) const;
};

}  // namespace flatshard
