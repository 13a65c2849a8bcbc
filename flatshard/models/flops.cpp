#include "flatshard/models/flops.h"

namespace flatshard::models {
namespace {

// Of the experts of a block so many are counted.
std::int64_t block_parameters(
    const ModelConfig& c,
    std::int64_t layer,
    std::int64_t experts) {
  const std::int64_t attention =
      c.dim * c.head_dim * (2 * c.heads + 2 * c.kv_heads) +
      (c.block.attention.qk_norm == QkNorm::head ? 2 * c.head_dim : 0);
  const std::int64_t norms = 2 * c.dim;
  if (!c.has_experts(layer)) {
    return attention + norms + 3 * c.dim * c.ffn_dim;
  }
  const std::int64_t expert = 3 * c.dim * c.moe.ffn_dim;
  return attention + norms + c.dim * c.moe.num_experts +
         (experts + c.moe.shared_experts) * expert;
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
  const double attention = 12.0 * static_cast<double>(c.layers) *
                           static_cast<double>(c.heads * c.head_dim) *
                           static_cast<double>(seq_len);
  return 6.0 * static_cast<double>(num_matmul_parameters(c)) +
         (convention == FlopsConvention::causal ? attention / 2 : attention);
}

}  // namespace flatshard::models
