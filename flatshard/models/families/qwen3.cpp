#include "flatshard/models/families/family.h"
#include "flatshard/models/families/hf_windows.h"

// Qwen3 without experts. Source: arXiv:2505.09388.
namespace flatshard::models {
namespace {

ModelConfig qwen3_defaults() {
  return {
      .family = "qwen3",
      .head_dim = 128,
      .vocab_size = 151936,
      .max_seq_len = 40960,
      .rope_theta = 1e6,
      .norm_eps = 1e-6,
      .block = {.attention = {.qk_norm = QkNorm::head}}};
}

struct Qwen3Size {
  std::string_view name;
  std::int64_t dim, layers, heads, ffn_dim;
  bool tied = false;
};

std::vector<Preset> qwen3_presets() {
  constexpr Qwen3Size kSizes[] = {
      {"qwen3_0_6b", 1024, 28, 16, 3072, true},
      {"qwen3_1_7b", 2048, 28, 16, 6144, true},
      {"qwen3_4b", 2560, 36, 32, 9728, true},
      {"qwen3_8b", 4096, 36, 32, 12288},
      {"qwen3_14b", 5120, 40, 40, 17408},
      {"qwen3_32b", 5120, 64, 64, 25600}};
  std::vector<Preset> presets;
  for (const Qwen3Size& size : kSizes) {
    ModelConfig config = qwen3_defaults();
    config.dim = size.dim;
    config.layers = size.layers;
    config.heads = size.heads;
    config.kv_heads = 8;
    config.ffn_dim = size.ffn_dim;
    config.tie_embeddings = size.tied;
    presets.push_back({size.name, config});
  }
  return presets;
}

void read_qwen3(const HfReader& reader, ModelConfig& config) {
  read_attention_bias(reader, config);
  read_qwen_windows(reader, config);
}

void write_qwen3(const ModelConfig& config, nlohmann::ordered_json& json) {
  json["attention_bias"] = config.block.attention.qkv_bias;
  write_qwen_windows(config, json);
}

}  // namespace

const Family& qwen3_family() {
  static const Family family{
      .name = "qwen3",
      .model_type = "qwen3",
      .architecture = "Qwen3ForCausalLM",
      .defaults = qwen3_defaults(),
      .absent =
          {.head_dim = 128,
           .max_seq_len = 32768,
           .rope_theta = 10000.0,
           .norm_eps = 1e-6},
      .free_keys =
          {"attention_bias", "sliding_window", "sliding_window_pattern"},
      .presets = qwen3_presets(),
      .read = read_qwen3,
      .write = write_qwen3};
  return family;
}

}  // namespace flatshard::models
