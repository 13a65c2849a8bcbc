#pragma once

#include <c10/core/ScalarType.h>

namespace flatshard {

/// Which dtype each representation of a unit's values has. A leaf value.
///
/// Gradients are reduced in float32 by default, as by the trainer: bfloat16 on
/// the wire moves half the bytes and rounds each partial sum.
struct Precision {
  at::ScalarType compute = at::kBFloat16;   ///< weights in forward, backward
  at::ScalarType reduce = at::kFloat;       ///< gradients on the wire
  at::ScalarType main_params = at::kFloat;  ///< what the optimizer updates
  at::ScalarType main_grads = at::kFloat;   ///< where microbatches accumulate

  static Precision full() {
    return {at::kFloat, at::kFloat, at::kFloat, at::kFloat};
  }

  /// @throws Error{config} naming the option whose dtype cannot work. Those of
  ///   frozen groups may be any: nothing is computed of them.
  void validate() const;

  bool operator==(const Precision&) const = default;
};

/// How the gradients of n data-parallel ranks become one.
enum class GradScaling {
  mean,        ///< averaged, by the collective or see GradDivision
  pre_scaled,  ///< multiplied by 1/n before, summed by the collective
  sum,         ///< summed; the program divides (per token)
};

}  // namespace flatshard
