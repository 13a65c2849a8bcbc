#pragma once

namespace flatshard::models {

/// Which activations of a block are recomputed in the backward.
enum class ActivationCheckpoint {
  none,
  full,       ///< the entire block; only its input is saved
  selective,  ///< its feed-forward half: norm, gate, up, SwiGLU, down
};

}  // namespace flatshard::models
