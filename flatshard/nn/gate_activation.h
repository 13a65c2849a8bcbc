#pragma once

namespace flatshard::nn {

/// What the gate of a feed-forward part goes through.
enum class GateActivation {
  silu,       ///< SwiGLU
  gelu_tanh,  ///< GeGLU, with the tanh approximation of GELU
  /// gate * sigmoid(1.702 gate) * (up + 1), gate at most 7 and up in [-7, 7].
  clamped_silu,
};

}  // namespace flatshard::nn
