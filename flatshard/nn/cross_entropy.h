#pragma once

#include "flatshard/nn/loss.h"
#include "flatshard/ops/cuda_ops.h"

namespace flatshard::nn {

// The cross-entropy of a chunk of logits, without autograd. The arguments equal
// the arguments of cuda::cross_entropy, used where it supports them.

/// @param soft_cap  see LossOptions
void chunk_cross_entropy(
    at::Tensor& logits,
    const at::Tensor& targets,
    const at::Tensor& scale,
    at::Tensor& loss,
    at::Tensor& lse,
    const cuda::CrossEntropyArgs& args,
    double soft_cap);

/// Returns targets as part_cross_entropy expects them: indices into this rank's
/// part of the vocabulary, or negative. Ignored targets are unchanged.
at::Tensor targets_of_part(
    const at::Tensor& targets,
    const LossOptions& options);

/// Computes chunk_cross_entropy of a vocabulary that LossOptions::ranks share.
/// They exchange each token's log-sum-exp over their part and the logit of its
/// target. The rank that has the target finds it, and the others have 0. All
/// ranks combine the same numbers in rank order, so their results are bitwise
/// identical.
void part_cross_entropy(
    at::Tensor& logits,
    const at::Tensor& targets,
    const at::Tensor& scale,
    at::Tensor& loss,
    at::Tensor& lse,
    const cuda::CrossEntropyArgs& args,
    const LossOptions& options);

}  // namespace flatshard::nn
