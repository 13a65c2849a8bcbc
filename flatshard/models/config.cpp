#include "flatshard/models/config.h"

#include "flatshard/core/error.h"
#include "flatshard/models/families/family.h"
#include "flatshard/moe/router.h"

#include <utility>

namespace flatshard::models {
namespace {

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

namespace {

void check_rope(const ModelConfig& c) {
  FLATSHARD_CHECK(
      c.rope_theta > 0.0,
      config,
      "model.rope_theta: expected a positive number, got {}",
      c.rope_theta);
  FLATSHARD_CHECK(
      c.local_rope_theta >= 0.0,
      config,
      "model.local_rope_theta: expected no less than 0, got {}",
      c.local_rope_theta);
  FLATSHARD_CHECK(
      c.partial_rotary_factor > 0.0 && c.partial_rotary_factor <= 1.0 &&
          c.rotary_dim() > 0 && c.rotary_dim() % 2 == 0,
      config,
      "partial_rotary_factor: expected a fraction of head_dim = {} that is an "
      "even number of elements, got {}",
      c.head_dim,
      c.partial_rotary_factor);
  if (!c.rope_scaling) {
    return;
  }
  const nn::RopeScaling& scaling = *c.rope_scaling;
  FLATSHARD_CHECK(
      scaling.factor >= 1.0 && scaling.original_max_positions > 0,
      config,
      "model.rope_factor: expected no less than 1 and positive original "
      "positions, got {} and {}",
      scaling.factor,
      scaling.original_max_positions);
  FLATSHARD_CHECK(
      scaling.type != nn::RopeType::llama3 ||
          scaling.high_freq_factor > scaling.low_freq_factor,
      config,
      "model.rope_scaling: expected high_freq_factor > low_freq_factor, got {} "
      "and {}",
      scaling.high_freq_factor,
      scaling.low_freq_factor);
  const auto factors = static_cast<std::size_t>(c.rotary_dim() / 2);
  FLATSHARD_CHECK(
      scaling.type != nn::RopeType::longrope ||
          (scaling.short_factors.size() == factors &&
           scaling.long_factors.size() == factors),
      config,
      "model.rope_scaling: longrope expected {} short and long factors, got {} "
      "and {}",
      factors,
      scaling.short_factors.size(),
      scaling.long_factors.size());
}

void check_block(const ModelConfig& c) {
  const AttentionOptions& attention = c.block.attention;
  const std::pair<const char*, double> at_least_zero[] = {
      {"sliding_window", static_cast<double>(attention.window)},
      {"query_pre_attn_scalar", attention.query_pre_attn_scalar},
      {"attention_soft_cap", attention.soft_cap},
      {"final_soft_cap", c.final_soft_cap}};
  for (const auto& [name, value] : at_least_zero) {
    FLATSHARD_CHECK(
        value >= 0.0,
        config,
        "model.{}: expected no less than 0, got {}",
        name,
        value);
  }
  FLATSHARD_CHECK(
      attention.window_pattern.empty() || attention.window > 0,
      config,
      "model.sliding_window_pattern has no effect without "
      "model.sliding_window; set both");
  FLATSHARD_CHECK(
      c.local_rope_theta == 0.0 || attention.window > 0,
      config,
      "model.local_rope_theta has no effect without model.sliding_window; set "
      "both");
  FLATSHARD_CHECK(
      c.moe.num_experts == 0 || c.block.norms == NormPlacement::before,
      config,
      "model.num_experts: blocks with experts have norms before their parts; "
      "use a family with these");
  FLATSHARD_CHECK(
      c.moe.shared_experts == 0 ||
          (c.block.activation == nn::GateActivation::silu && !c.block.mlp_bias),
      config,
      "model.shared_experts: shared experts have SwiGLU and no biases; use a "
      "family with these");
}

}  // namespace

std::int64_t ModelConfig::rotary_dim() const {
  return static_cast<std::int64_t>(
      static_cast<double>(head_dim) * partial_rotary_factor);
}

void check_tensor_parallel(
    const ModelConfig& config,
    std::int64_t size,
    std::string_view option) {
  const auto check = [&](std::int64_t number, std::string_view what) {
    FLATSHARD_CHECK(
        number % size == 0,
        config,
        "{} = {}: expected a divisor of model.{} = {}; change one of them",
        option,
        size,
        what,
        number);
  };
  check(config.heads, "heads");
  check(config.kv_heads, "kv_heads");
  if (config.moe.num_experts == 0 || config.moe.dense_layers > 0) {
    check(config.ffn_dim, "ffn_dim");
  }
  if (config.moe.shared_experts > 0) {
    check(
        config.moe.shared_experts * config.moe.ffn_dim,
        "shared_experts * moe_ffn_dim");
  }
  FLATSHARD_CHECK(
      size <= config.vocab_size,
      config,
      "{} = {}: expected no more ranks than model.vocab_size = {}",
      option,
      size,
      config.vocab_size);
}

void check_context_parallel(
    const ModelConfig& config,
    std::int64_t size,
    std::int64_t tensor_ranks,
    std::string_view option) {
  const std::string_view each =
      tensor_ranks > 1 ? " of a tensor-parallel rank" : "";
  FLATSHARD_CHECK(
      config.heads % (size * tensor_ranks) == 0,
      config,
      "{} = {}: expected a divisor of the {} heads{} (model.heads); change one "
      "of them",
      option,
      size,
      config.heads / tensor_ranks,
      each);
  const std::int64_t kv_heads = config.kv_heads / tensor_ranks;
  FLATSHARD_CHECK(
      kv_heads % size == 0 || size % kv_heads == 0,
      config,
      "{} = {}: expected a divisor or a multiple of the {} kv heads{} "
      "(model.kv_heads); change one of them",
      option,
      size,
      kv_heads,
      each);
}

void ModelConfig::validate() {
  family_of(*this);
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
  check_block(*this);
  check_rope(*this);
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
}

}  // namespace flatshard::models
