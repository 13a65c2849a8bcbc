#include "flatshard/models/flops.h"

namespace flatshard::models {
namespace {

std::int64_t attention_parameters(const ModelConfig& c) {
  const AttentionOptions& options = c.block.attention;
  const std::int64_t q = c.heads * c.head_dim;
  const std::int64_t kv = c.kv_heads * c.head_dim;
  std::int64_t sum = c.dim * (2 * q + 2 * kv);
  switch (options.qk_norm) {
    case QkNorm::none:
      break;
    case QkNorm::head:
      sum += 2 * c.head_dim;
      break;
    case QkNorm::projection:
      sum += q + kv;
      break;
  }
  return sum + (options.qkv_bias ? q + 2 * kv : 0) +
         (options.output_bias ? c.dim : 0) + (options.sinks ? c.heads : 0);
}

// Returns how many tokens a token attends to in a block, on average over a
// sequence: without a window half of the sequence.
double attended_tokens(
    const ModelConfig& c,
    std::int64_t layer,
    std::int64_t seq_len) {
  const auto seq = static_cast<double>(seq_len);
  const AttentionOptions& options = c.block.attention;
  if (!options.has_window(layer) || options.window >= seq_len) {
    return seq / 2;
  }
  const auto window = static_cast<double>(options.window);
  return window - window * window / (2 * seq);
}

// Returns the parameters of a block, with so many of its experts.
std::int64_t block_parameters(
    const ModelConfig& c,
    std::int64_t layer,
    std::int64_t experts) {
  const std::int64_t attention = attention_parameters(c);
  const std::int64_t norms =
      (c.block.norms == NormPlacement::both ? 4 : 2) * c.dim;
  if (!c.has_experts(layer)) {
    return attention + norms + 3 * c.dim * c.ffn_dim +
           (c.block.mlp_bias ? 2 * c.ffn_dim + c.dim : 0);
  }
  const std::int64_t biases = c.block.mlp_bias ? 2 * c.moe.ffn_dim + c.dim : 0;
  const std::int64_t expert = 3 * c.dim * c.moe.ffn_dim + biases;
  const std::int64_t router =
      (c.dim + (c.block.mlp_bias ? 1 : 0)) * c.moe.num_experts;
  return attention + norms + router + (experts + c.moe.shared_experts) * expert;
}

std::int64_t count_parameters(
    const ModelConfig& c,
    std::int64_t experts,
    std::int64_t embeddings) {
  std::int64_t sum = c.dim + embeddings * c.vocab_size * c.dim;
  for (std::int64_t layer = 0; layer < c.layers; ++layer) {
    sum += block_parameters(c, layer, experts);
  }
  return sum;
}

ModelConfig valid(ModelConfig config) {
  config.validate();
  return config;
}

}  // namespace

std::int64_t num_parameters(const ModelConfig& config) {
  const ModelConfig c = valid(config);
  return count_parameters(c, c.moe.num_experts, c.tie_embeddings ? 1 : 2);
}

std::int64_t num_active_parameters(const ModelConfig& config) {
  const ModelConfig c = valid(config);
  return count_parameters(c, c.moe.experts_per_token, c.tie_embeddings ? 1 : 2);
}

std::int64_t num_expert_parameters(const ModelConfig& config) {
  const ModelConfig c = valid(config);
  return count_parameters(c, c.moe.num_experts, 0) - count_parameters(c, 0, 0);
}

std::int64_t num_matmul_parameters(const ModelConfig& config) {
  const ModelConfig c = valid(config);
  return count_parameters(c, c.moe.experts_per_token, 1);
}

double flops_per_token(
    const ModelConfig& config,
    std::int64_t seq_len,
    FlopsConvention convention) {
  const ModelConfig c = valid(config);
  double attended = 0;
  for (std::int64_t layer = 0; layer < c.layers; ++layer) {
    attended += attended_tokens(c, layer, seq_len);
  }
  const double causal =
      12.0 * static_cast<double>(c.heads * c.head_dim) * attended;
  return 6.0 * static_cast<double>(num_matmul_parameters(c)) +
         (convention == FlopsConvention::causal ? causal : 2 * causal);
}

}  // namespace flatshard::models
