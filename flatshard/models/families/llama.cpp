#include "flatshard/models/families/family.h"

// Llama 2, 3, 3.1 and 3.2. Source: arXiv:2407.21783.
namespace flatshard::models {
namespace {

constexpr nn::RopeScaling kLlama31{
    .factor = 8.0,
    .low_freq_factor = 1.0,
    .high_freq_factor = 4.0,
    .original_max_positions = 8192};
constexpr nn::RopeScaling kLlama32{
    .factor = 32.0,
    .low_freq_factor = 1.0,
    .high_freq_factor = 4.0,
    .original_max_positions = 8192};

std::vector<Preset> llama_presets() {
  return {
      {"llama3_1b",
       {.dim = 2048,
        .layers = 16,
        .heads = 32,
        .kv_heads = 8,
        .ffn_dim = 8192,
        .max_seq_len = 131072,
        .rope_scaling = kLlama32,
        .tie_embeddings = true}},
      {"llama3_3b",
       {.dim = 3072,
        .layers = 28,
        .heads = 24,
        .kv_heads = 8,
        .ffn_dim = 8192,
        .max_seq_len = 131072,
        .rope_scaling = kLlama32,
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
        .rope_scaling = kLlama31}},
  };
}

void read_llama(const HfReader& reader, ModelConfig& /*config*/) {
  reader.expect<bool>("attention_bias", false);
  reader.expect<bool>("mlp_bias", false);
}

void write_llama(const ModelConfig& /*config*/, nlohmann::ordered_json& json) {
  json["attention_bias"] = false;
  json["mlp_bias"] = false;
}

}  // namespace

const Family& llama_family() {
  static const Family family{
      .name = "llama",
      .model_type = "llama",
      .architecture = "LlamaForCausalLM",
      .absent = {.max_seq_len = 2048, .rope_theta = 10000.0, .norm_eps = 1e-6},
      .presets = llama_presets(),
      .read = read_llama,
      .write = write_llama};
  return family;
}

}  // namespace flatshard::models
