#include "flatshard/models/config.h"

#include "flatshard/core/error.h"
#include "flatshard/moe/router.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace flatshard::models {
namespace {

constexpr nn::RopeScaling kLlama31{
    .factor = 8.0,
    .low_freq_factor = 1.0,
    .high_freq_factor = 4.0,
    .original_max_positions = 8192};
constexpr nn::RopeScaling kLlama32{
    .factor = 32.0,
    .low_freq_factor = 1.0,
    .high_freq_factor = 4.0,
    .original_max_positions = 8192};

std::vector<std::pair<std::string_view, ModelConfig>> presets() {
  return {
      {"llama3_1b",
       {.dim = 2048,
        .layers = 16,
        .heads = 32,
        .kv_heads = 8,
        .ffn_dim = 8192,
        .max_seq_len = 131072,
        .rope_scaling = kLlama32,
        .tie_embeddings = true}},
      {"llama3_3b",
       {.dim = 3072,
        .layers = 28,
        .heads = 24,
        .kv_heads = 8,
        .ffn_dim = 8192,
        .max_seq_len = 131072,
        .rope_scaling = kLlama32,
        .tie_embeddings = true}},
      {"llama3_8b", {}},
      {"llama3_70b",
       {.dim = 8192,
        .layers = 80,
        .heads = 64,
        .kv_heads = 8,
        .ffn_dim = 28672}},
      {"llama3_405b",
       {.dim = 16384,
        .layers = 126,
        .heads = 128,
        .kv_heads = 8,
        .ffn_dim = 53248,
        .max_seq_len = 131072,
        .rope_scaling = kLlama31}},
      {"mixtral_8x7b",
       {.family = "mixtral",
        .vocab_size = 32000,
        .max_seq_len = 32768,
        .rope_theta = 1e6,
        .moe = {.num_experts = 8}}},
      {"qwen3_30b_a3b",
       {.family = "qwen3_moe",
        .dim = 2048,
        .layers = 48,
        .heads = 32,
        .kv_heads = 4,
        .head_dim = 128,
        .ffn_dim = 6144,
        .vocab_size = 151936,
        .max_seq_len = 40960,
        .rope_theta = 1e6,
        .norm_eps = 1e-6,
        .qk_norm = true,
        .moe = {.num_experts = 128, .experts_per_token = 8, .ffn_dim = 768}}},
      {"mixtral_tiny",
       {.family = "mixtral",
        .dim = 64,
        .layers = 2,
        .heads = 4,
        .kv_heads = 2,
        .ffn_dim = 96,
        .vocab_size = 257,
        .max_seq_len = 256,
        .moe = {.num_experts = 4}}},
      {"qwen3_moe_tiny",
       {.family = "qwen3_moe",
        .dim = 64,
        .layers = 2,
        .heads = 4,
        .kv_heads = 2,
        .head_dim = 32,
        .ffn_dim = 96,
        .vocab_size = 257,
        .max_seq_len = 256,
        .norm_eps = 1e-6,
        .qk_norm = true,
        .moe = {.num_experts = 8, .experts_per_token = 2, .ffn_dim = 48}}},
  };
}

}  // namespace

namespace {

// What config.json of a family can say of experts, and nothing beside it.
void check_family(const ModelConfig& c) {
  const auto refuse = [&](bool found, const char* field, const char* what) {
    FLATSHARD_CHECK(
        !found,
        config,
        "model.{}: the family {} has {}; leave the key out, or take the family "
        "moe",
        field,
        c.family,
        what);
  };
  const MoeConfig& moe = c.moe;
  if (c.family == "llama") {
    refuse(moe.num_experts > 0, "num_experts", "no experts");
    refuse(c.qk_norm, "qk_norm", "no norms of queries and keys");
    return;
  }
  FLATSHARD_CHECK(
      moe.num_experts > 0,
      config,
      "model.num_experts: the family {} expected at least 1, got {}",
      c.family,
      moe.num_experts);
  if (c.family == "moe") {
    return;
  }
  refuse(moe.shared_experts > 0, "shared_experts", "no shared experts");
  refuse(
      moe.router_score != nn::RouterScore::softmax,
      "router_score",
      "softmax scores");
  refuse(moe.router_scale != 1.0, "router_scale", "none");
  refuse(moe.router_groups != 1, "router_groups", "no groups of experts");
  refuse(
      moe.router_bias,
      "router_bias (moe.balance_rate)",
      "no bias of the router");
  if (c.family == "mixtral") {
    refuse(c.qk_norm, "qk_norm", "no norms of queries and keys");
    refuse(
        !moe.router_normalize,
        "router_normalize",
        "weights that add up to 1");
    refuse(moe.dense_layers > 0, "dense_layers", "experts in every block");
    refuse(moe.ffn_dim != c.ffn_dim, "moe_ffn_dim", "one ffn_dim");
  } else {
    FLATSHARD_CHECK(
        c.qk_norm,
        config,
        "model.qk_norm: the family {} has norms of queries and keys; leave the "
        "key out",
        c.family);
  }
}

void check_experts(const ModelConfig& c) {
  const MoeConfig& moe = c.moe;
  const std::pair<const char*, std::int64_t> at_least_zero[] = {
      {"num_experts", moe.num_experts},
      {"shared_experts", moe.shared_experts},
      {"dense_layers", moe.dense_layers}};
  for (const auto& [name, value] : at_least_zero) {
    FLATSHARD_CHECK(
        value >= 0,
        config,
        "model.{}: expected no less than 0, got {}",
        name,
        value);
  }
  check_family(c);
  if (moe.num_experts == 0) {
    return;
  }
  FLATSHARD_CHECK(
      moe.dense_layers <= c.layers,
      config,
      "model.dense_layers: expected at most layers = {}, got {}",
      c.layers,
      moe.dense_layers);
  FLATSHARD_CHECK(
      moe.ffn_dim > 0,
      config,
      "model.moe_ffn_dim: expected a positive number, got {}",
      moe.ffn_dim);
  try {
    nn::RouterOptions{
        .experts_per_token = moe.experts_per_token,
        .groups = moe.router_groups,
        .kept_groups = moe.router_kept_groups}
        .check(moe.num_experts);
  } catch (const Error& error) {
    FLATSHARD_THROW(config, "model.{}", error.message());
  }
}

}  // namespace

std::vector<std::string_view> family_names() {
  return {"llama", "mixtral", "qwen3_moe", "moe"};
}

void ModelConfig::validate() {
  FLATSHARD_CHECK(
      family != "deepseek_v3",
      config,
      "model.family: deepseek_v3 has multi-head latent attention, which is not "
      "supported; the family moe has its router on grouped-query attention");
  const auto families = family_names();
  FLATSHARD_CHECK(
      std::find(families.begin(), families.end(), family) != families.end(),
      config,
      "model.family: expected one of {}, got '{}'; it is not supported",
      fmt::join(families, ", "),
      family);
  const std::pair<const char*, std::int64_t> positive[] = {
      {"dim", dim},
      {"layers", layers},
      {"heads", heads},
      {"kv_heads", kv_heads},
      {"ffn_dim", ffn_dim},
      {"vocab_size", vocab_size},
      {"max_seq_len", max_seq_len}};
  for (const auto& [name, value] : positive) {
    FLATSHARD_CHECK(
        value > 0,
        config,
        "model.{}: expected a positive number, got {}",
        name,
        value);
  }
  FLATSHARD_CHECK(
      heads % kv_heads == 0,
      config,
      "model.kv_heads: expected a divisor of heads {}, got {}",
      heads,
      kv_heads);
  if (head_dim == 0) {
    FLATSHARD_CHECK(
        dim % heads == 0,
        config,
        "model.heads: expected a divisor of dim {} (or set head_dim), got {}",
        dim,
        heads);
    head_dim = dim / heads;
  }
  FLATSHARD_CHECK(
      head_dim > 0 && head_dim % 2 == 0,
      config,
      "model.head_dim: expected an even number, got {}",
      head_dim);
  if (moe.ffn_dim == 0) {
    moe.ffn_dim = moe.num_experts > 0 ? ffn_dim : 0;
  }
  check_experts(*this);
  FLATSHARD_CHECK(
      rope_theta > 0.0,
      config,
      "model.rope_theta: expected a positive number, got {}",
      rope_theta);
  FLATSHARD_CHECK(
      norm_eps > 0.0,
      config,
      "model.norm_eps: expected a positive number, got {}",
      norm_eps);
  FLATSHARD_CHECK(
      initializer_range > 0.0 && initializer_range < 1e6,
      config,
      "model.initializer_range: expected a positive number, got {}",
      initializer_range);
  if (rope_scaling) {
    FLATSHARD_CHECK(
        rope_scaling->factor > 0.0 &&
            rope_scaling->high_freq_factor > rope_scaling->low_freq_factor &&
            rope_scaling->original_max_positions > 0,
        config,
        "model.rope_scaling: expected factor > 0 and high_freq_factor > "
        "low_freq_factor, got {}, {} and {}",
        rope_scaling->factor,
        rope_scaling->high_freq_factor,
        rope_scaling->low_freq_factor);
  }
}

std::vector<std::string_view> preset_names() {
  std::vector<std::string_view> names;
  for (const auto& [name, config] : presets()) {
    names.push_back(name);
  }
  return names;
}

ModelConfig preset(std::string_view name) {
  for (auto& [known, config] : presets()) {
    if (known == name) {
      ModelConfig found = config;
      found.validate();
      return found;
    }
  }
  FLATSHARD_THROW(
      config,
      "expected a model preset, one of {}, got '{}'",
      fmt::join(preset_names(), ", "),
      name);
}

}  // namespace flatshard::models
