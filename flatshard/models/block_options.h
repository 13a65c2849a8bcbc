#pragma once

#include "flatshard/moe/expert_layout.h"
#include "flatshard/ops/gate_activation.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flatshard::models {

/// RMSNorm of queries and keys, before their rotation.
enum class QkNorm {
  none,
  head,        ///< each head separately
  projection,  ///< all heads together
};

/// Placement of RMSNorms around attention and the feed-forward part.
enum class NormPlacement {
  before,  ///< x + f(norm(x))
  after,   ///< x + norm(f(x))
  both,    ///< x + norm(f(norm(x)))
};

/// Family-specific options of attention. A leaf value.
struct AttentionOptions {
  bool qkv_bias = false;
  bool output_bias = false;
  QkNorm qk_norm = QkNorm::none;
  /// Sliding-window size in tokens, including the current token, for blocks
  /// with a window; 0: no block has a window.
  std::int64_t window = 0;
  /// Block i has the window where [i % size] is true; empty: every block has.
  std::vector<bool> window_pattern;
  /// Scores are divided by its square root; 0: head_dim.
  double query_pre_attn_scalar = 0.0;
  double soft_cap = 0.0;  ///< for attention scores; 0: none
  bool sinks = false;     ///< a trained one for each head; see AttentionArgs

  bool has_window(std::int64_t layer) const {
    return window > 0 &&
           (window_pattern.empty() ||
            window_pattern
                [static_cast<std::size_t>(layer) % window_pattern.size()]);
  }

  bool operator==(const AttentionOptions&) const = default;
};

/// Family-specific options of a block. A leaf value.
struct BlockOptions {
  NormPlacement norms = NormPlacement::before;
  bool norms_add_one = false;  ///< see nn::RmsNormOptions
  nn::GateActivation activation = nn::GateActivation::silu;
  /// Whether feed-forward layers, experts and their router have biases.
  bool mlp_bias = false;
  nn::ExpertLayout expert_layout = nn::ExpertLayout::stacked;
  AttentionOptions attention;

  bool operator==(const BlockOptions&) const = default;
};

}  // namespace flatshard::models
