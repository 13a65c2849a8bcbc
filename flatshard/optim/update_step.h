#pragma once

#include <cmath>
#include <cstdint>

#include "flatshard/core/float_arithmetic.h"

namespace flatshard {

/// Scalars of one update of one parameter group, as kernels read them.
struct UpdateRow {
  float lr = 0;
  float weight_decay = 0;
  float beta1 = 0;       ///< AdamW
  float beta2 = 0;       ///< AdamW
  float eps = 0;         ///< AdamW
  float step_size = 0;   ///< AdamW: lr / (1 - beta1^t)
  float inverse_c2 = 0;  ///< AdamW: 1 / sqrt(1 - beta2^t)
  float momentum = 0;    ///< SGD; 0 in the first step
};
static_assert(sizeof(UpdateRow) == 32, "two loads of a kernel");

/// Returns the factor of a weight that decays.
FLATSHARD_ARITHMETIC float kept(const UpdateRow& s) {
  using namespace float_arithmetic;
  return plus(1.0F, -times(s.lr, s.weight_decay));
}

/// A run of the flat shard whose elements share a parameter group.
struct UpdateRange {
  /// UpdateRange::group of elements that this update does not change.
  static constexpr std::int32_t kSkipped = -1;

  std::int64_t end = 0;    ///< first element after the run
  std::int32_t group = 0;  ///< index into FlatUpdate::rows, or kSkipped

  bool operator==(const UpdateRange&) const = default;
};

/// A run of the flat shard that has states, and its place in them.
struct UpdateRun {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int32_t group = 0;         ///< as UpdateRange::group
  std::int64_t states_begin = 0;  ///< of the run's first element

  bool operator==(const UpdateRun&) const = default;
};

/// Scalars of AdamW.
struct AdamWStep {
  float lr = 0;
  float weight_decay = 0;
  float beta1 = 0;
  float beta2 = 0;
  float eps = 0;
  float bias_correction1 = 1;  ///< 1 - beta1^t
  float bias_correction2 = 1;  ///< 1 - beta2^t

  UpdateRow row() const {
    return {
        .lr = lr,
        .weight_decay = weight_decay,
        .beta1 = beta1,
        .beta2 = beta2,
        .eps = eps,
        .step_size = lr / bias_correction1,
        .inverse_c2 = 1.0F / std::sqrt(bias_correction2)};
  }
};

/// Scalars of SGD.
struct SgdStep {
  float lr = 0;
  float weight_decay = 0;
  float momentum = 0;
  bool first = false;  ///< the momentum starts as the gradient

  UpdateRow row() const {
    return {
        .lr = lr,
        .weight_decay = weight_decay,
        .momentum = first ? 0.0F : momentum};
  }
};

}  // namespace flatshard
