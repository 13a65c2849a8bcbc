#include "flatshard/models/families/gemma.h"

#include <algorithm>

// The text model of Gemma 3: every sixth block attends to all tokens, and the
// others rotate by another base. Source: arXiv:2503.19786.
namespace flatshard::models {
namespace {

constexpr std::int64_t kGemma3Pattern = 6;

ModelConfig gemma3_defaults() {
  ModelConfig config = gemma_defaults("gemma3");
  config.max_seq_len = 32768;
  config.rope_theta = 1e6;
  config.local_rope_theta = 10000.0;
  AttentionOptions& attention = config.block.attention;
  attention.qk_norm = QkNorm::head;
  attention.window = 512;
  attention.window_pattern.assign(kGemma3Pattern, true);
  attention.window_pattern.back() = false;
  return config;
}

std::vector<Preset> gemma3_presets() {
  const auto sized = [](std::int64_t dim,
                        std::int64_t layers,
                        std::int64_t heads,
                        std::int64_t kv_heads,
                        std::int64_t ffn_dim) {
    ModelConfig config = gemma3_defaults();
    config.dim = dim;
    config.layers = layers;
    config.heads = heads;
    config.kv_heads = kv_heads;
    config.ffn_dim = ffn_dim;
    return config;
  };
  std::vector<Preset> presets{
      {"gemma3_270m", sized(640, 18, 4, 1, 2048)},
      {"gemma3_1b", sized(1152, 26, 4, 1, 6912)},
      {"gemma3_4b", sized(2560, 34, 8, 4, 10240)},
      {"gemma3_12b", sized(3840, 48, 16, 8, 15360)},
      {"gemma3_27b", sized(5376, 62, 32, 16, 21504)}};
  for (std::size_t i = 2; i < presets.size(); ++i) {
    ModelConfig& config = presets[i].config;
    config.vocab_size = 262208;
    config.max_seq_len = 131072;
    config.block.attention.window = 1024;
    config.rope_scaling = nn::RopeScaling{
        .type = nn::RopeType::linear,
        .factor = 8.0,
        .original_max_positions = config.max_seq_len};
  }
  presets.back().config.head_dim = 128;
  presets.back().config.block.attention.query_pre_attn_scalar = 168.0;
  return presets;
}

void read_gemma3(const HfReader& reader, ModelConfig& config) {
  // transformers has the key and does not use it.
  reader.refuse("attn_logit_softcapping");
  read_gemma(
      reader,
      reader.get<std::int64_t>("sliding_window_pattern", kGemma3Pattern),
      config);
  config.local_rope_theta =
      config.block.attention.window > 0
          ? reader.get<double>("rope_local_base_freq", 10000.0)
          : 0.0;
}

void write_gemma3(const ModelConfig& config, nlohmann::ordered_json& json) {
  write_gemma(config, json);
  json["attn_logit_softcapping"] = nullptr;
  json["rope_local_base_freq"] = config.local_rope_theta > 0.0
                                     ? config.local_rope_theta
                                     : config.rope_theta;
}

void check_gemma3(const ModelConfig& config) {
  // Its class has a base for blocks with a window, and never scales it.
  FLATSHARD_CHECK(
      config.block.attention.window == 0 || config.local_rope_theta > 0.0,
      config,
      "model.local_rope_theta: models of the family gemma3 have one for blocks "
      "with a window, got {}",
      config.local_rope_theta);
}

}  // namespace

const Family& gemma3_family() {
  static const Family family{
      .name = "gemma3",
      .model_type = "gemma3_text",
      .architecture = "Gemma3ForCausalLM",
      .activation_key = "hidden_activation",
      .defaults = gemma3_defaults(),
      .absent =
          {.head_dim = 256,
           .max_seq_len = 131072,
           .rope_theta = 1e6,
           .norm_eps = 1e-6,
           .tie_embeddings = true},
      .free_keys =
          {"attention_bias",
           "sliding_window",
           "sliding_window_pattern",
           "query_pre_attn_scalar",
           "final_soft_cap",
           "local_rope_theta"},
      .names = gemma_names(),
      .presets = gemma3_presets(),
      .read = read_gemma3,
      .write = write_gemma3,
      .check = check_gemma3};
  return family;
}

}  // namespace flatshard::models
