#pragma once

#include "flatshard/nn/module.h"
#include "flatshard/nn/recompute.h"

#include <cstdint>
#include <vector>

namespace flatshard::nn {

struct TokenRunsOptions {
  std::int64_t tokens = 0;  ///< of one run, at least 1
  /// It is the result of the part around this one, so that nothing reads it
  /// when the part runs again. Then that second run does not compute it.
  bool is_result_of_part = false;
  /// Other modules whose parameters fn uses. They outlive the owner.
  std::vector<Module*> others;
};

/// Returns fn(inputs), computed for one run of tokens after the other. Each run
/// keeps only its inputs, and the backward runs it again before the next one:
/// so the activations of one run exist at a time. Weight gradients of the runs
/// are added in place, and those that a WgradSink stores in 16 bits are added
/// in float32 and rounded once.
///
/// Results of a token depend only on this token, and fn draws no random
/// numbers. Its parameters and inputs are as `checkpoint` has them.
/// @param fn      of inputs [1, n, dim]; the result has the same shape.
/// @param inputs  [..., dim] with equal sizes
/// @return        as the first input
/// @throws as `checkpoint`.
at::Tensor in_token_runs(
    Module& owner,
    RecomputeFn fn,
    const TensorList& inputs,
    TokenRunsOptions options);

}  // namespace flatshard::nn
