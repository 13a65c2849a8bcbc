#pragma once

#include "flatshard/moe/router_args.h"
#include "flatshard/train/config/key.h"

namespace flatshard::config {

template <>
inline constexpr Word<std::optional<nn::RouterScore>>
    kWords<std::optional<nn::RouterScore>>[] = {
        {"auto", std::nullopt},
        {"softmax", nn::RouterScore::softmax},
        {"sigmoid", nn::RouterScore::sigmoid}};

/// The replacement of the rotation's scaling of a preset or a config.json.
enum class RopeScalingChoice {
  from_shape,
  none,
  llama3,
  linear,
  dynamic,
  yarn
};

template <>
inline constexpr Word<RopeScalingChoice> kWords<RopeScalingChoice>[] = {
    {"auto", RopeScalingChoice::from_shape},
    {"none", RopeScalingChoice::none},
    {"llama3", RopeScalingChoice::llama3},
    {"linear", RopeScalingChoice::linear},
    {"dynamic", RopeScalingChoice::dynamic},
    {"yarn", RopeScalingChoice::yarn}};

struct Model {
  std::string family = "auto";
  std::string hf_config;
  std::string init_from;
  std::string preset;
  std::optional<std::int64_t> dim;
  std::optional<std::int64_t> layers;
  std::optional<std::int64_t> heads;
  std::optional<std::int64_t> kv_heads;
  std::optional<std::int64_t> head_dim;
  std::optional<std::int64_t> ffn_dim;
  std::optional<std::int64_t> vocab_size;
  std::optional<std::int64_t> max_seq_len;
  std::optional<double> rope_theta;
  RopeScalingChoice rope_scaling = RopeScalingChoice::from_shape;
  std::optional<double> rope_factor;
  std::optional<std::int64_t> rope_original_seq_len;
  std::optional<double> local_rope_theta;
  std::optional<double> norm_eps;
  std::optional<double> initializer_range;
  std::optional<bool> tie_embeddings;
  std::optional<bool> qk_norm;
  std::optional<bool> attention_bias;
  std::optional<bool> mlp_bias;
  std::optional<std::int64_t> sliding_window;
  std::optional<std::int64_t> sliding_window_pattern;
  std::optional<double> query_pre_attn_scalar;
  std::optional<double> attention_soft_cap;
  std::optional<double> final_soft_cap;
  bool plain_attention = false;
  std::optional<std::int64_t> num_experts;
  std::optional<std::int64_t> experts_per_token;
  std::optional<std::int64_t> moe_ffn_dim;
  std::optional<std::int64_t> shared_experts;
  std::optional<std::int64_t> dense_layers;
  std::optional<nn::RouterScore> router_score;
  std::optional<bool> router_normalize;
  std::optional<double> router_scale;
  std::optional<std::int64_t> router_groups;
  std::optional<std::int64_t> router_kept_groups;
};

struct Moe {
  double aux_loss = 0.0;
  double z_loss = 0.0;
  double balance_rate = 0.0;
  double expert_capacity_factor = 0.0;
};

/// [model] and [moe].
KeyTable model_keys();

}  // namespace flatshard::config
