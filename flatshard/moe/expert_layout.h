#pragma once

namespace flatshard::nn {

/// Memory layout of the weights of experts. Each expert is a gated feed-forward
/// part of width ffn.
enum class ExpertLayout {
  /// gate_up [experts, 2 * ffn, dim], gate first, and down [experts, dim, ffn].
  stacked,
  /// gate_up [experts, dim, 2 * ffn] with alternating columns of gate and up,
  /// and down [experts, ffn, dim].
  interleaved,
};

}  // namespace flatshard::nn
