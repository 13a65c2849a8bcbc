#include "flatshard/models/flops.h"

#include "flatshard/models/llama.h"
#include "flatshard/models/moe.h"
#include "flatshard/nn/module_tree.h"

#include <set>

namespace flatshard::models {
namespace {

// Returns the average number of tokens that one token attends to in a block,
// over a sequence: without a window half of the sequence.
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

ModelConfig valid(ModelConfig config) {
  config.validate();
  return config;
}

struct Counts {
  std::int64_t experts = 0;
  /// The input embedding, unless the head shares it.
  std::int64_t embedding = 0;
  std::int64_t others = 0;

  std::int64_t sum() const { return experts + embedding + others; }
};

// Adds the parameters of a model of one block, the block's `num_blocks` times.
void add(
    const ModelConfig& one_block,
    std::int64_t num_blocks,
    bool with_ends,
    Counts& counts) {
  Llama model(one_block);  // on the meta device
  std::set<const c10::TensorImpl*> found;
  for (const nn::NamedParameter& p : nn::named_parameters(*model)) {
    const bool is_of_block = p.name.starts_with("model.layers.");
    if (!found.insert(p.tensor.unsafeGetTensorImpl()).second ||
        (!is_of_block && !with_ends)) {
      continue;
    }
    const bool is_embedding =
        p.name.starts_with("model.embed_tokens.") && !one_block.tie_embeddings;
    (is_expert_parameter(p.name) ? counts.experts
     : is_embedding              ? counts.embedding
                                 : counts.others) +=
        p.tensor.numel() * (is_of_block ? num_blocks : 1);
  }
}

// Blocks of one kind have equal shapes, so one of each is made.
Counts count_parameters(const ModelConfig& c) {
  Counts counts;
  const bool has_experts = c.moe.num_experts > 0;
  const std::int64_t dense = has_experts ? c.moe.dense_layers : c.layers;
  ModelConfig one = c;
  one.layers = 1;
  one.moe.dense_layers = has_experts ? 1 : 0;
  if (dense > 0) {
    add(one, dense, /*with_ends=*/true, counts);
  }
  one.moe.dense_layers = 0;
  if (c.layers > dense) {
    add(one, c.layers - dense, /*with_ends=*/dense == 0, counts);
  }
  return counts;
}

// Returns the parameters of the experts that one token activates.
std::int64_t active_experts(const ModelConfig& c, const Counts& counts) {
  return c.moe.num_experts == 0
             ? 0
             : counts.experts / c.moe.num_experts * c.moe.experts_per_token;
}

}  // namespace

std::int64_t num_parameters(const ModelConfig& config) {
  return count_parameters(valid(config)).sum();
}

std::int64_t num_active_parameters(const ModelConfig& config) {
  const ModelConfig c = valid(config);
  const Counts counts = count_parameters(c);
  return counts.sum() - counts.experts + active_experts(c, counts);
}

std::int64_t num_expert_parameters(const ModelConfig& config) {
  return count_parameters(valid(config)).experts;
}

std::int64_t num_matmul_parameters(const ModelConfig& config) {
  const ModelConfig c = valid(config);
  const Counts counts = count_parameters(c);
  return counts.others + active_experts(c, counts);
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
