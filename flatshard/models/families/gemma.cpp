#include "flatshard/models/families/gemma.h"

#include "flatshard/models/families/hf_windows.h"

#include <cmath>

namespace flatshard::models {

ModelConfig gemma_defaults(std::string_view family) {
  return {
      .family = std::string(family),
      .head_dim = 256,
      .vocab_size = 262144,
      .norm_eps = 1e-6,
      .tie_embeddings = true,
      .scale_embeddings = true,
      .block = {
          .norms = NormPlacement::both,
          .norms_add_one = true,
          .activation = nn::GateActivation::gelu_tanh}};
}

FamilyNames gemma_names() {
  return {
      .renames = {
          {".self_attn.post_norm.", ".post_attention_layernorm."},
          {".post_attention_layernorm.", ".pre_feedforward_layernorm."},
          {".mlp.post_norm.", ".post_feedforward_layernorm."}}};
}

void read_gemma(
    const HfReader& reader,
    std::int64_t pattern,
    ModelConfig& config) {
  reader.expect<bool>("use_bidirectional_attention", false);
  read_attention_bias(reader, config);
  AttentionOptions& attention = config.block.attention;
  attention.window = reader.is_null("sliding_window")
                         ? 0
                         : reader.get<std::int64_t>("sliding_window", 4096);
  read_windows(reader, config, [pattern](std::int64_t layer) {
    return (layer + 1) % pattern != 0;
  });
  const auto scalar = reader.get<double>("query_pre_attn_scalar", 256.0);
  attention.query_pre_attn_scalar =
      scalar == static_cast<double>(config.head_dim) ? 0.0 : scalar;
  config.final_soft_cap = reader.get<double>(
      "final_logit_softcapping",
      reader.is_null("final_logit_softcapping") ? 0.0 : config.final_soft_cap);
}

void write_gemma(const ModelConfig& config, nlohmann::ordered_json& json) {
  const AttentionOptions& attention = config.block.attention;
  json["attention_bias"] = attention.qkv_bias;
  json["sliding_window"] = nullptr;
  if (attention.window > 0) {
    json["sliding_window"] = attention.window;
  }
  write_layer_types(config, json);
  const double scalar = attention.query_pre_attn_scalar > 0.0
                            ? attention.query_pre_attn_scalar
                            : static_cast<double>(config.head_dim);
  // transformers 5 rejects 256.0 because it requires an integer.
  if (const auto whole = std::llround(scalar);
      static_cast<double>(whole) == scalar) {
    json["query_pre_attn_scalar"] = whole;
  } else {
    json["query_pre_attn_scalar"] = scalar;
  }
  json["final_logit_softcapping"] = nullptr;
  if (config.final_soft_cap > 0.0) {
    json["final_logit_softcapping"] = config.final_soft_cap;
  }
}

}  // namespace flatshard::models
