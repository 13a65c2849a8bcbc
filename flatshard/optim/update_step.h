#pragma once

namespace flatshard {

/// Scalars of one update, passed to kernels by value.
struct AdamWStep {
  float lr = 0;
  float beta1 = 0;
  float beta2 = 0;
  float eps = 0;
  float bias_correction1 = 1;  ///< 1 - beta1^t
  float bias_correction2 = 1;  ///< 1 - beta2^t
};

struct SgdStep {
  float lr = 0;
  float momentum = 0;
  bool first = false;  ///< the momentum starts as the gradient
};

}  // namespace flatshard
