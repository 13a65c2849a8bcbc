#include "flatshard/models/families/family.h"

// OLMo 2: norms after attention and feed-forward part, and norms over all
// queries and over all keys. Source: arXiv:2501.00656.
namespace flatshard::models {
namespace {

ModelConfig olmo2_defaults() {
  return {
      .family = "olmo2",
      .vocab_size = 100352,
      .max_seq_len = 4096,
      .norm_eps = 1e-6,
      .block = {
          .norms = NormPlacement::after,
          .attention = {.qk_norm = QkNorm::projection}}};
}

struct Olmo2Size {
  std::string_view name;
  std::int64_t dim, layers, heads, kv_heads, ffn_dim;
};

std::vector<Preset> olmo2_presets() {
  constexpr Olmo2Size kSizes[] = {
      {"olmo2_1b", 2048, 16, 16, 16, 8192},
      {"olmo2_7b", 4096, 32, 32, 32, 11008},
      {"olmo2_13b", 5120, 40, 40, 40, 13824},
      {"olmo2_32b", 5120, 64, 40, 8, 27648}};
  std::vector<Preset> presets;
  for (const Olmo2Size& size : kSizes) {
    ModelConfig config = olmo2_defaults();
    config.dim = size.dim;
    config.layers = size.layers;
    config.heads = size.heads;
    config.kv_heads = size.kv_heads;
    config.ffn_dim = size.ffn_dim;
    presets.push_back({size.name, config});
  }
  return presets;
}

void write_olmo2(const ModelConfig& config, nlohmann::ordered_json& json) {
  json["attention_bias"] = config.block.attention.qkv_bias;
  if (config.rope_scaling) {
    // The transformers class accepts only these two keys.
    nlohmann::ordered_json& rope = json["rope_scaling"];
    rope = {{"type", rope["rope_type"]}, {"factor", rope["factor"]}};
  }
}

}  // namespace

const Family& olmo2_family() {
  static const Family family{
      .name = "olmo2",
      .model_type = "olmo2",
      .architecture = "Olmo2ForCausalLM",
      .defaults = olmo2_defaults(),
      .absent = {.max_seq_len = 2048, .rope_theta = 10000.0, .norm_eps = 1e-5},
      .free_keys = {"attention_bias"},
      .rope_types = {nn::RopeType::linear, nn::RopeType::dynamic},
      .names =
          {.renames =
               {{".self_attn.post_norm.", ".post_attention_layernorm."},
                {".mlp.post_norm.", ".post_feedforward_layernorm."}}},
      .presets = olmo2_presets(),
      .read = read_attention_bias,
      .write = write_olmo2};
  return family;
}

}  // namespace flatshard::models
