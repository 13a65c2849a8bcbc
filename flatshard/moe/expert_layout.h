#pragma once

namespace flatshard::nn {

/// How the weights of experts, each a gated feed-forward part of width ffn, are
/// arranged.
enum class ExpertLayout {
  /// gate_up [experts, 2 * ffn, dim], gate first, and down [experts, dim, ffn].
  stacked,
  /// gate_up [experts, dim, 2 * ffn] with alternating columns of gate and up,
  /// and down [experts, ffn, dim].
  interleaved,
};

}  // namespace flatshard::nn
