#include "flatshard/models/families/family.h"

// Phi-3, Phi-3.5 and Phi-4. Source: arXiv:2404.14219.
namespace flatshard::models {
namespace {

std::vector<Preset> phi3_presets() {
  return {
      {"phi3_mini",
       {.family = "phi3",
        .dim = 3072,
        .layers = 32,
        .heads = 32,
        .kv_heads = 32,
        .ffn_dim = 8192,
        .vocab_size = 32064,
        .max_seq_len = 4096,
        .rope_theta = 10000.0,
        .block = {.attention = {.window = 2047}}}},
      {"phi3_medium",
       {.family = "phi3",
        .dim = 5120,
        .layers = 40,
        .heads = 40,
        .kv_heads = 10,
        .ffn_dim = 17920,
        .vocab_size = 32064,
        .max_seq_len = 4096,
        .rope_theta = 10000.0,
        .block = {.attention = {.window = 2047}}}},
      {"phi4",
       {.family = "phi3",
        .dim = 5120,
        .layers = 40,
        .heads = 40,
        .kv_heads = 10,
        .ffn_dim = 17920,
        .vocab_size = 100352,
        .max_seq_len = 16384,
        .rope_theta = 250000.0}},
  };
}

std::int64_t query_rows(const ModelConfig& config) {
  return config.heads * config.head_dim;
}

std::int64_t kv_rows(const ModelConfig& config) {
  return config.kv_heads * config.head_dim;
}

std::int64_t ffn_rows(const ModelConfig& config) {
  return config.ffn_dim;
}

void read_phi3(const HfReader& reader, ModelConfig& config) {
  reader.expect<bool>("attention_bias", false);
  reader.expect<double>("resid_pdrop", 0.0);
  reader.expect<double>("embd_pdrop", 0.0);
  config.block.attention.window = reader.get<std::int64_t>("sliding_window", 0);
}

void write_phi3(const ModelConfig& config, nlohmann::ordered_json& json) {
  const std::int64_t window = config.block.attention.window;
  json["sliding_window"] = nullptr;
  if (window > 0) {
    json["sliding_window"] = window;
  }
}

}  // namespace

const Family& phi3_family() {
  static const Family family{
      .name = "phi3",
      .model_type = "phi3",
      .architecture = "Phi3ForCausalLM",
      .defaults = {.family = "phi3", .rope_theta = 10000.0},
      .absent = {.max_seq_len = 4096, .rope_theta = 10000.0, .norm_eps = 1e-5},
      .free_keys = {"sliding_window", "partial_rotary_factor"},
      .rope_types = {nn::RopeType::longrope},
      .names =
          {.fused =
               {{"self_attn.qkv_proj.weight",
                 {{"self_attn.q_proj.weight", query_rows},
                  {"self_attn.k_proj.weight", kv_rows},
                  {"self_attn.v_proj.weight", kv_rows}}},
                {"mlp.gate_up_proj.weight",
                 {{"mlp.gate_proj.weight", ffn_rows},
                  {"mlp.up_proj.weight", ffn_rows}}}}},
      .presets = phi3_presets(),
      .read = read_phi3,
      .write = write_phi3};
  return family;
}

}  // namespace flatshard::models
