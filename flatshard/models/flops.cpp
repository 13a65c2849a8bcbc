#include "flatshard/models/flops.h"

namespace flatshard::models {
namespace {

std::int64_t block_parameters(const ModelConfig& c) {
  const std::int64_t attention =
      c.dim * c.head_dim * (2 * c.heads + 2 * c.kv_heads);
  return attention + 3 * c.dim * c.ffn_dim + 2 * c.dim;
}

}  // namespace

std::int64_t num_parameters(const ModelConfig& config) {
  ModelConfig c = config;
  c.validate();
  const std::int64_t embeddings =
      (c.tie_embeddings ? 1 : 2) * c.vocab_size * c.dim;
  return c.layers * block_parameters(c) + c.dim + embeddings;
}

std::int64_t num_matmul_parameters(const ModelConfig& config) {
  const std::int64_t all = num_parameters(config);
  return config.tie_embeddings ? all : all - config.vocab_size * config.dim;
}

double flops_per_token(
    const ModelConfig& config,
    std::int64_t seq_len,
    FlopsConvention convention) {
  ModelConfig c = config;
  c.validate();
  const double attention = 12.0 * static_cast<double>(c.layers) *
                           static_cast<double>(c.heads * c.head_dim) *
                           static_cast<double>(seq_len);
  return 6.0 * static_cast<double>(num_matmul_parameters(c)) +
         (convention == FlopsConvention::causal ? attention / 2 : attention);
}

}  // namespace flatshard::models
