#pragma once

namespace flatshard::models {

/// Which activations of a block are recomputed in the backward.
enum class ActivationCheckpoint {
  none,
  full,       ///< the whole block; only its input is kept
  selective,  ///< its feed-forward half: norm, gate, up, SwiGLU, down
};

}  // namespace flatshard::models
