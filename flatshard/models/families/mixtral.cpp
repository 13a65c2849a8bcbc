#include "flatshard/models/families/family.h"

// Mixtral. Source: arXiv:2401.04088.
namespace flatshard::models {
namespace {

std::vector<Preset> mixtral_presets() {
  return {
      {"mixtral_8x7b",
       {.family = "mixtral",
        .vocab_size = 32000,
        .max_seq_len = 32768,
        .rope_theta = 1e6,
        .moe = {.num_experts = 8}}},
      {"mixtral_tiny",
       {.family = "mixtral",
        .dim = 64,
        .layers = 2,
        .heads = 4,
        .kv_heads = 2,
        .ffn_dim = 96,
        .vocab_size = 257,
        .max_seq_len = 256,
        .moe = {.num_experts = 4}}},
  };
}

void read_mixtral(const HfReader& reader, ModelConfig& config) {
  reader.expect<double>("router_jitter_noise", 0.0);
  reader.refuse("sliding_window");
  config.moe = {
      .num_experts = reader.need<std::int64_t>("num_local_experts"),
      .experts_per_token = reader.need<std::int64_t>("num_experts_per_tok")};
}

void write_mixtral(const ModelConfig& config, nlohmann::ordered_json& json) {
  json["num_local_experts"] = config.moe.num_experts;
  json["num_experts_per_tok"] = config.moe.experts_per_token;
  json["sliding_window"] = nullptr;
}

}  // namespace

const Family& mixtral_family() {
  static const Family family{
      .name = "mixtral",
      .model_type = "mixtral",
      .architecture = "MixtralForCausalLM",
      .defaults = {.family = "mixtral"},
      .absent = {.max_seq_len = 131072, .rope_theta = 1e6, .norm_eps = 1e-5},
      .has_experts = true,
      .names =
          {.renames = {{".mlp.", ".block_sparse_moe."}},
           .experts = {.gate = "w1", .up = "w3", .down = "w2"}},
      .presets = mixtral_presets(),
      .read = read_mixtral,
      .write = write_mixtral,
      .check = check_uniform_experts};
  return family;
}

}  // namespace flatshard::models
