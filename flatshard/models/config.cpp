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

}  // namespace flatshard::models
