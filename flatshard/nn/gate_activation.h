#pragma once

namespace flatshard::nn {

/// The function that the gate of a feed-forward part goes through.
enum class GateActivation {
  silu,       ///< SwiGLU
  gelu_tanh,  ///< GeGLU, with the tanh approximation of GELU
};

}  // namespace flatshard::nn
