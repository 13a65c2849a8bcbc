#include "flatshard/models/families/gemma.h"

// Gemma 2: every second block has a window; scores and logits are capped.
// Source: arXiv:2408.00118.
namespace flatshard::models {
namespace {

constexpr std::int64_t kGemma2Pattern = 2;

ModelConfig gemma2_defaults() {
  ModelConfig config = gemma_defaults("gemma2");
  config.vocab_size = 256000;
  config.rope_theta = 10000.0;
  config.final_soft_cap = 30.0;
  config.block.attention.window = 4096;
  config.block.attention.window_pattern = {true, false};
  config.block.attention.soft_cap = 50.0;
  return config;
}

std::vector<Preset> gemma2_presets() {
  const auto sized = [](std::int64_t dim,
                        std::int64_t layers,
                        std::int64_t heads,
                        std::int64_t kv_heads,
                        std::int64_t ffn_dim) {
    ModelConfig config = gemma2_defaults();
    config.dim = dim;
    config.layers = layers;
    config.heads = heads;
    config.kv_heads = kv_heads;
    config.ffn_dim = ffn_dim;
    return config;
  };
  ModelConfig largest = sized(4608, 46, 32, 16, 36864);
  largest.head_dim = 128;
  largest.block.attention.query_pre_attn_scalar = 144.0;
  return {
      {"gemma2_2b", sized(2304, 26, 8, 4, 9216)},
      {"gemma2_9b", sized(3584, 42, 16, 8, 14336)},
      {"gemma2_27b", largest}};
}

void read_gemma2(const HfReader& reader, ModelConfig& config) {
  config.block.attention.soft_cap =
      reader.is_null("attn_logit_softcapping")
          ? 0.0
          : reader.get<double>("attn_logit_softcapping", 50.0);
  read_gemma(reader, kGemma2Pattern, config);
}

void write_gemma2(const ModelConfig& config, nlohmann::ordered_json& json) {
  write_gemma(config, json);
  json["attn_logit_softcapping"] = nullptr;
  if (config.block.attention.soft_cap > 0.0) {
    json["attn_logit_softcapping"] = config.block.attention.soft_cap;
  }
}

}  // namespace

const Family& gemma2_family() {
  static const Family family{
      .name = "gemma2",
      .model_type = "gemma2",
      .architecture = "Gemma2ForCausalLM",
      .activation_key = "hidden_activation",
      .defaults = gemma2_defaults(),
      .absent =
          {.head_dim = 256,
           .max_seq_len = 8192,
           .rope_theta = 10000.0,
           .norm_eps = 1e-6,
           .tie_embeddings = true},
      .free_keys =
          {"attention_bias",
           "sliding_window",
           "sliding_window_pattern",
           "query_pre_attn_scalar",
           "attention_soft_cap",
           "final_soft_cap"},
      .names = gemma_names(),
      .presets = gemma2_presets(),
      .read = read_gemma2,
      .write = write_gemma2};
  return family;
}

}  // namespace flatshard::models
