#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace flatshard::models {

struct SampleOptions {
  std::int64_t max_new_tokens = 128;
  double temperature = 1.0;  ///< 0: always the likeliest token
  std::int64_t top_k = 0;    ///< 0: all tokens
  /// Draws among the likeliest tokens whose probabilities add up to this.
  /// Source: nucleus sampling, arXiv:1904.09751.
  double top_p = 1.0;
  std::int64_t max_context = 2048;        ///< older tokens are dropped
  std::vector<std::int64_t> stop_tokens;  ///< each ends it, and is returned
};

/// tokens int64 [1, seq] -> logits [1, seq, vocab]
using LogitsFn = std::function<at::Tensor(const at::Tensor& tokens)>;

/// Continues `prompt` token by token with a full forward pass each; waits for
/// the device at every token. Draws from `generator`, a CPU one.
/// @return the new tokens only.
/// @throws Error{usage} for an empty prompt, Error{config} for bad options.
std::vector<std::int64_t> sample(
    const LogitsFn& logits,
    const std::vector<std::int64_t>& prompt,
    at::Device device,
    at::Generator generator,
    const SampleOptions& options = {});

}  // namespace flatshard::models
