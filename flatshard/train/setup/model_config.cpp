#include "flatshard/train/setup/model_config.h"

#include "flatshard/core/error.h"
#include "flatshard/train/config/option_errors.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace flatshard {
namespace {

template <class T, class U>
void override_with(T& value, const std::optional<U>& key) {
  if (key) {
    value = static_cast<T>(*key);
  }
}

void override_experts(models::ModelConfig& model, const Config& config) {
  const config::Model& m = config.model;
  models::MoeConfig& moe = model.moe;
  override_with(moe.num_experts, m.num_experts);
  override_with(moe.experts_per_token, m.experts_per_token);
  override_with(moe.ffn_dim, m.moe_ffn_dim);
  override_with(moe.shared_experts, m.shared_experts);
  override_with(moe.dense_layers, m.dense_layers);
  override_with(moe.router_score, m.router_score);
  override_with(moe.router_normalize, m.router_normalize);
  override_with(moe.router_scale, m.router_scale);
  override_with(moe.router_groups, m.router_groups);
  override_with(moe.router_kept_groups, m.router_kept_groups);
  moe.router_bias = config.moe.balance_rate > 0;
}

void override_block(models::ModelConfig& model, const config::Model& m) {
  models::AttentionOptions& attention = model.block.attention;
  if (m.qk_norm && *m.qk_norm != (attention.qk_norm != models::QkNorm::none)) {
    attention.qk_norm =
        *m.qk_norm ? models::QkNorm::head : models::QkNorm::none;
  }
  override_with(attention.qkv_bias, m.attention_bias);
  override_with(attention.output_bias, m.attention_bias);
  override_with(model.block.mlp_bias, m.mlp_bias);
  override_with(attention.window, m.sliding_window);
  if (m.sliding_window_pattern) {
    attention.window_pattern.assign(*m.sliding_window_pattern, true);
    attention.window_pattern.back() = false;
  }
  override_with(attention.query_pre_attn_scalar, m.query_pre_attn_scalar);
  override_with(attention.soft_cap, m.attention_soft_cap);
  override_with(model.final_soft_cap, m.final_soft_cap);
}

std::optional<nn::RopeType> rope_type_of(config::RopeScalingChoice choice) {
  switch (choice) {
    case config::RopeScalingChoice::llama3:
      return nn::RopeType::llama3;
    case config::RopeScalingChoice::linear:
      return nn::RopeType::linear;
    case config::RopeScalingChoice::dynamic:
      return nn::RopeType::dynamic;
    case config::RopeScalingChoice::yarn:
      return nn::RopeType::yarn;
    default:
      return std::nullopt;
  }
}

// Also sets max_seq_len, because it grows with the factor.
void override_rope(models::ModelConfig& model, const config::Model& m) {
  override_with(model.rope_theta, m.rope_theta);
  override_with(model.local_rope_theta, m.local_rope_theta);
  if (m.rope_scaling == config::RopeScalingChoice::none) {
    model.rope_scaling.reset();
  } else if (const auto type = rope_type_of(m.rope_scaling)) {
    nn::RopeScaling scaling{.type = *type, .factor = m.rope_factor.value()};
    scaling.original_max_positions =
        m.rope_original_seq_len.value_or(model.max_seq_len);
    if (*type == nn::RopeType::yarn) {
      scaling.attention_factor = nn::yarn_attention_factor(scaling.factor);
    }
    model.max_seq_len = std::max(
        model.max_seq_len,
        static_cast<std::int64_t>(
            scaling.factor *
            static_cast<double>(scaling.original_max_positions)));
    model.rope_scaling = scaling;
  }
  override_with(model.max_seq_len, m.max_seq_len);
}

// Layers before and after the experts can be recorded.
void check_graphs_with_experts(
    const models::ModelConfig& model,
    const Config& config) {
  const config::CudaGraph& graph = config.cuda_graph;
  if (!graph.enabled()) {
    return;
  }
  const std::set<std::string> regions = graph_regions(config);
  FLATSHARD_CHECK(
      graph.impl == config::CudaGraphImpl::unit && !regions.contains("block"),
      config,
      "cuda_graph.impl = \"{}\" with experts: how many rows an expert has is "
      "not known when a graph is recorded; use \"unit\" with "
      "cuda_graph.modules = \"attn,moe_router\"",
      config::word_of(graph.impl));
  FLATSHARD_CHECK(
      model.moe.dense_layers > 0 || !regions.contains("mlp"),
      config,
      "cuda_graph.modules: mlp is a part of blocks without experts, and the "
      "model has no such blocks (model.dense_layers = 0); use "
      "\"attn,moe_router\"");
}

void check_recomputed_layers(
    const models::ModelConfig& model,
    const Config& config) {
  const auto& layers = config.activation_checkpoint.layers;
  FLATSHARD_CHECK(
      !layers || *layers <= model.layers,
      config,
      "activation_checkpoint.layers: expected at most the {} blocks of the "
      "model, found {}; leave it unset to recompute all",
      model.layers,
      *layers);
}

// Rejects keys that do nothing, or cannot be had, with or without experts.
void check_experts(const models::ModelConfig& model, const Config& config) {
  const bool has_experts = model.moe.num_experts > 0;
  FLATSHARD_CHECK(
      !has_experts || config.activation_checkpoint.mlp_chunk_tokens == 0,
      config,
      "activation_checkpoint.mlp_chunk_tokens is for models without experts; "
      "use 0, or leave model.num_experts unset");
  const std::pair<const char*, bool> keys[] = {
      {"moe.aux_loss", config.moe.aux_loss > 0},
      {"moe.z_loss", config.moe.z_loss > 0},
      {"moe.balance_rate", config.moe.balance_rate > 0},
      {"moe.expert_capacity_factor", config.moe.expert_capacity_factor > 0},
      {"debug.force_balance", config.debug.force_balance},
      {"parallelism.overlap_expert_parallel",
       config.parallelism.overlap_expert_parallel},
      {"parallelism.delay_wgrad", config.parallelism.delay_wgrad},
      {"parallelism.expert_parallel_degree",
       config.parallelism.expert_parallel_degree > 1},
      {"parallelism.expert_tensor_parallel_degree",
       config.parallelism.expert_tensor_parallel_degree > 1}};
  for (const auto& [key, is_set] : keys) {
    FLATSHARD_CHECK(
        has_experts || !is_set,
        config,
        "{} is for models with experts; remove it, or set model.num_experts",
        key);
  }
  const auto check_divides = [&](const char* key,
                                 std::int64_t degree,
                                 const char* divided,
                                 std::int64_t whole) {
    FLATSHARD_CHECK(
        whole % degree == 0,
        config,
        "{} = {} must divide {} = {}",
        key,
        degree,
        divided,
        whole);
  };
  check_divides(
      "parallelism.expert_parallel_degree",
      config.parallelism.expert_parallel_degree,
      "the experts of a layer, model.num_experts",
      model.moe.num_experts);
  check_divides(
      "parallelism.expert_tensor_parallel_degree",
      config.parallelism.expert_tensor_parallel_degree,
      "the width of an expert, model.moe_ffn_dim",
      model.moe.ffn_dim);
  if (has_experts) {
    check_graphs_with_experts(model, config);
  }
  for (const char* part : {"moe_router", "moe_preprocess"}) {
    FLATSHARD_CHECK(
        has_experts || !graph_regions(config).contains(part),
        config,
        "cuda_graph.modules: {} is a part of blocks with experts; use mlp, or "
        "set model.num_experts",
        part);
  }
}

}  // namespace

models::MoeOptions moe_options(const config::Moe& keys, bool force_balance) {
  return {
      .aux_loss = keys.aux_loss,
      .z_loss = keys.z_loss,
      .capacity_factor = keys.expert_capacity_factor,
      .force_balance = force_balance};
}

models::ModelConfig model_config(const Config& config) {
  const config::Model& m = config.model;
  models::ModelConfig model;
  if (!m.preset.empty()) {
    model =
        for_option("model.preset", [&] { return models::preset(m.preset); });
  } else if (!m.hf_config.empty()) {
    model = for_option("model.hf_config", [&] {
      return models::from_hf_json(m.hf_config);
    });
  } else if (!m.init_from.empty() && !m.dim) {
    model = for_option("model.init_from", [&] {
      return models::from_hf_json(
          std::filesystem::path(m.init_from) / "config.json");
    });
  } else {
    FLATSHARD_CHECK(
        m.dim && m.layers && m.heads && m.ffn_dim && m.vocab_size,
        config,
        "expected model.preset, model.hf_config, or all of model.dim, "
        "model.layers, model.heads, model.ffn_dim and model.vocab_size");
    if (m.family != "auto") {
      model = models::family_defaults(m.family);
    }
    model.kv_heads = *m.heads;
    model.head_dim = 0;
    model.max_seq_len = config.training.seq_len;
  }
  FLATSHARD_CHECK(
      m.family == "auto" || m.family == model.family,
      config,
      "model.family: expected {}, as in model.preset, model.hf_config or "
      "model.init_from, or auto, got '{}'",
      model.family,
      m.family);
  if (model.moe.ffn_dim == model.ffn_dim) {
    model.moe.ffn_dim = 0;  // experts as wide as the model's stay so
  }
  override_with(model.dim, m.dim);
  override_with(model.layers, m.layers);
  override_with(model.heads, m.heads);
  override_with(model.kv_heads, m.kv_heads);
  override_with(model.head_dim, m.head_dim);
  override_with(model.ffn_dim, m.ffn_dim);
  override_with(model.vocab_size, m.vocab_size);
  override_rope(model, m);
  override_with(model.norm_eps, m.norm_eps);
  override_with(model.initializer_range, m.initializer_range);
  override_with(model.tie_embeddings, m.tie_embeddings);
  override_block(model, m);
  override_experts(model, config);
  check_experts(model, config);
  check_recomputed_layers(model, config);
  model.validate();
  models::check_tensor_parallel(
      model,
      config.parallelism.tensor_parallel_degree,
      "parallelism.tensor_parallel_degree");
  models::check_context_parallel(
      model,
      config.parallelism.head_ranks(),
      config.parallelism.tensor_parallel_degree,
      config.parallelism.context_hosts() == 1
          ? "parallelism.context_parallel_degree"
          : "parallelism.context_parallel_a2a_degree");
  const double soft_cap = model.block.attention.soft_cap;
  FLATSHARD_CHECK(
      !config.activation_checkpoint.saves_attention() || soft_cap == 0.0,
      config,
      "activation_checkpoint.save = [\"attention\"]: no fused kernel computes "
      "attention with soft caps (model.attention_soft_cap = {}), so its result "
      "cannot be stored for the backward; remove the key",
      soft_cap);
  FLATSHARD_CHECK(
      config.training.seq_len <= model.max_seq_len,
      config,
      "training.seq_len: expected at most model.max_seq_len = {}, got {}",
      model.max_seq_len,
      config.training.seq_len);
  return model;
}

}  // namespace flatshard
