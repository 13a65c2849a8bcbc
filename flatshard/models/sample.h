#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace flatshard::models {

struct SampleOptions {
  double temperature = 1.0;  ///< 0: always the likeliest token
  std::int64_t top_k = 0;    ///< samples from the K most likely tokens; 0: all
  /// Draws among the likeliest tokens whose probabilities add up to this, after
  /// top_k. Source: nucleus sampling, arXiv:1904.09751.
  double top_p = 1.0;

  /// @throws Error{config} naming the option.
  void check() const;
};

/// Draws the next token of each sequence by inverting the cumulative
/// distribution: a token depends only on its row and the row's uniform.
///
/// @param logits    [rows, vocab], any float dtype and device
/// @param uniforms  of each row, in [0, 1); not read at temperature 0
/// @return          of each row; waits for the device once.
std::vector<std::int64_t> draw_tokens(
    const at::Tensor& logits,
    std::span<const double> uniforms,
    const SampleOptions& options);

}  // namespace flatshard::models
