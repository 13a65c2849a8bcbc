#include "flatshard/models/families/family.h"

// Llama 2, 3, 3.1 and 3.2. Source: arXiv:2407.21783.
namespace flatshard::models {
namespace {

nn::RopeScaling llama3_rope(double factor) {
  return {
      .type = nn::RopeType::llama3,
      .factor = factor,
      .low_freq_factor = 1.0,
      .high_freq_factor = 4.0,
      .original_max_positions = 8192};
}

std::vector<Preset> llama_presets() {
  return {
      {"llama3_1b",
       {.dim = 2048,
        .layers = 16,
        .heads = 32,
        .kv_heads = 8,
        .ffn_dim = 8192,
        .max_seq_len = 131072,
        .rope_scaling = llama3_rope(32.0),
        .tie_embeddings = true}},
      {"llama3_3b",
       {.dim = 3072,
        .layers = 28,
        .heads = 24,
        .kv_heads = 8,
        .ffn_dim = 8192,
        .max_seq_len = 131072,
        .rope_scaling = llama3_rope(32.0),
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
        .rope_scaling = llama3_rope(8.0)}},
  };
}

void read_llama(const HfReader& reader, ModelConfig& config) {
  read_attention_bias(reader, config);
  config.block.mlp_bias = reader.get<bool>("mlp_bias", false);
}

void write_llama(const ModelConfig& config, nlohmann::ordered_json& json) {
  json["attention_bias"] = config.block.attention.qkv_bias;
  json["mlp_bias"] = config.block.mlp_bias;
}

}  // namespace

const Family& llama_family() {
  static const Family family{
      .name = "llama",
      .model_type = "llama",
      .architecture = "LlamaForCausalLM",
      .absent = {.max_seq_len = 2048, .rope_theta = 10000.0, .norm_eps = 1e-6},
      .free_keys = {"attention_bias", "mlp_bias"},
      .presets = llama_presets(),
      .read = read_llama,
      .write = write_llama};
  return family;
}

}  // namespace flatshard::models
