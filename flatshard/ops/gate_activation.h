#pragma once

namespace flatshard::nn {

/// The activation function of the gate of a feed-forward part.
enum class GateActivation {
  silu,       ///< SwiGLU
  gelu_tanh,  ///< GeGLU, with the tanh approximation of GELU
  /// gate * sigmoid(1.702 gate) * (up + 1), gate at most 7 and up in [-7, 7].
  clamped_silu,
};

}  // namespace flatshard::nn
