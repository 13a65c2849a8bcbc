#pragma once

#include "flatshard/core/float_arithmetic.h"
#include "flatshard/optim/update_step.h"

namespace flatshard {

/// AdamW with decoupled weight decay, arXiv:1711.05101 (algorithm 2):
///   w -= lr * decay * w;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
///   w -= lr * (m / c1) / (sqrt(v / c2) + eps)
struct AdamWRule {
  static constexpr int kRequiredStates = 2;  ///< exp_avg and exp_avg_sq
  static constexpr bool kWritesFloat8 = true;

  FLATSHARD_ARITHMETIC static void
  update_moments(const UpdateRow& s, float g, float& m, float& v) {
    using namespace float_arithmetic;
    m = plus(times(s.beta1, m), times(1.0F - s.beta1, g));
    v = plus(times(s.beta2, v), times(times(1.0F - s.beta2, g), g));
  }

  FLATSHARD_ARITHMETIC static float numerator(const UpdateRow& s, float m) {
    return float_arithmetic::times(s.step_size, m);
  }

  /// @param root  of the new v.
  FLATSHARD_ARITHMETIC static float denominator(
      const UpdateRow& s,
      float root) {
    using namespace float_arithmetic;
    return plus(times(root, s.inverse_c2), s.eps);
  }

  FLATSHARD_ARITHMETIC static float
  updated(const UpdateRow& s, float w, float quotient) {
    using namespace float_arithmetic;
    return plus(times(w, kept(s)), -quotient);
  }

  FLATSHARD_ARITHMETIC static void
  update(const UpdateRow& s, float& w, float g, float& m, float& v) {
    using namespace float_arithmetic;
    update_moments(s, g, m, v);
    w = updated(s, w, divide(numerator(s, m), denominator(s, square_root(v))));
  }
};

}  // namespace flatshard
