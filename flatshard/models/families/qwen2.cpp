#include "flatshard/models/families/family.h"
#include "flatshard/models/families/hf_windows.h"

// Qwen2 and Qwen2.5. Source: arXiv:2412.15115.
namespace flatshard::models {
namespace {

ModelConfig qwen2_defaults() {
  return {
      .family = "qwen2",
      .vocab_size = 152064,
      .max_seq_len = 131072,
      .rope_theta = 1e6,
      .norm_eps = 1e-6,
      .block = {.attention = {.qkv_bias = true}}};
}

struct Qwen2Size {
  std::string_view name;
  std::int64_t dim, layers, heads, kv_heads, ffn_dim;
  bool is_small = false;  ///< a smaller vocabulary, and a tied head
};

std::vector<Preset> qwen2_presets() {
  constexpr Qwen2Size kSizes[] = {
      {"qwen2_5_0_5b", 896, 24, 14, 2, 4864, true},
      {"qwen2_5_1_5b", 1536, 28, 12, 2, 8960, true},
      {"qwen2_5_3b", 2048, 36, 16, 2, 11008, true},
      {"qwen2_5_7b", 3584, 28, 28, 4, 18944},
      {"qwen2_5_14b", 5120, 48, 40, 8, 13824},
      {"qwen2_5_32b", 5120, 64, 40, 8, 27648},
      {"qwen2_5_72b", 8192, 80, 64, 8, 29568}};
  std::vector<Preset> presets;
  for (const Qwen2Size& size : kSizes) {
    ModelConfig config = qwen2_defaults();
    config.dim = size.dim;
    config.layers = size.layers;
    config.heads = size.heads;
    config.kv_heads = size.kv_heads;
    config.ffn_dim = size.ffn_dim;
    if (size.is_small) {
      config.vocab_size = 151936;
      config.max_seq_len = 32768;
      config.tie_embeddings = true;
    }
    presets.push_back({size.name, config});
  }
  return presets;
}

}  // namespace

const Family& qwen2_family() {
  static const Family family{
      .name = "qwen2",
      .model_type = "qwen2",
      .architecture = "Qwen2ForCausalLM",
      .defaults = qwen2_defaults(),
      .absent = {.max_seq_len = 32768, .rope_theta = 10000.0, .norm_eps = 1e-6},
      .free_keys = {"sliding_window", "sliding_window_pattern"},
      .presets = qwen2_presets(),
      .read = read_qwen_windows,
      .write = write_qwen_windows};
  return family;
}

}  // namespace flatshard::models
