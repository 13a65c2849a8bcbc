#include "flatshard/models/families/family.h"

#include <fmt/ranges.h>

// Qwen3 with experts. Source: arXiv:2505.09388.
namespace flatshard::models {
namespace {

BlockOptions qwen3_moe_block() {
  return {.attention = {.qk_norm = QkNorm::head}};
}

std::vector<Preset> qwen3_moe_presets() {
  return {
      {"qwen3_30b_a3b",
       {.family = "qwen3_moe",
        .dim = 2048,
        .layers = 48,
        .heads = 32,
        .kv_heads = 4,
        .head_dim = 128,
        .ffn_dim = 6144,
        .vocab_size = 151936,
        .max_seq_len = 40960,
        .rope_theta = 1e6,
        .norm_eps = 1e-6,
        .block = qwen3_moe_block(),
        .moe = {.num_experts = 128, .experts_per_token = 8, .ffn_dim = 768}}},
      {"qwen3_moe_tiny",
       {.family = "qwen3_moe",
        .dim = 64,
        .layers = 2,
        .heads = 4,
        .kv_heads = 2,
        .head_dim = 32,
        .ffn_dim = 96,
        .vocab_size = 257,
        .max_seq_len = 256,
        .norm_eps = 1e-6,
        .block = qwen3_moe_block(),
        .moe = {.num_experts = 8, .experts_per_token = 2, .ffn_dim = 48}}},
  };
}

// Blocks without experts have to be the first ones.
std::int64_t read_dense_layers(const HfReader& reader) {
  const auto layers =
      reader.get<std::vector<std::int64_t>>("mlp_only_layers", {});
  for (std::size_t i = 0; i < layers.size(); ++i) {
    FLATSHARD_CHECK(
        layers[i] == static_cast<std::int64_t>(i),
        config,
        "{}: expected mlp_only_layers to be the first layers, got [{}]; it is "
        "not supported",
        reader.file(),
        fmt::join(layers, ", "));
  }
  return static_cast<std::int64_t>(layers.size());
}

void read_qwen3_moe(const HfReader& reader, ModelConfig& config) {
  reader.expect<bool>("attention_bias", false);
  reader.expect<std::int64_t>("decoder_sparse_step", 1);
  reader.expect<bool>("use_sliding_window", false);
  // transformers 5 writes it as Mixtral's is.
  const char* const experts =
      reader.has("num_local_experts") ? "num_local_experts" : "num_experts";
  config.moe = {
      .num_experts = reader.need<std::int64_t>(experts),
      .experts_per_token = reader.need<std::int64_t>("num_experts_per_tok"),
      .ffn_dim = reader.need<std::int64_t>("moe_intermediate_size"),
      .dense_layers = read_dense_layers(reader),
      .router_normalize = reader.need<bool>("norm_topk_prob")};
}

void write_qwen3_moe(const ModelConfig& config, nlohmann::ordered_json& json) {
  const MoeConfig& moe = config.moe;
  json["attention_bias"] = false;
  json["num_experts"] = moe.num_experts;
  json["num_experts_per_tok"] = moe.experts_per_token;
  json["moe_intermediate_size"] = moe.ffn_dim;
  json["norm_topk_prob"] = moe.router_normalize;
  json["decoder_sparse_step"] = 1;
  auto dense = nlohmann::ordered_json::array();
  for (std::int64_t i = 0; i < moe.dense_layers; ++i) {
    dense.push_back(i);
  }
  json["mlp_only_layers"] = dense;
  json["use_sliding_window"] = false;
}

}  // namespace

const Family& qwen3_moe_family() {
  static const Family family{
      .name = "qwen3_moe",
      .model_type = "qwen3_moe",
      .architecture = "Qwen3MoeForCausalLM",
      .defaults = {.family = "qwen3_moe", .block = qwen3_moe_block()},
      .absent = {.max_seq_len = 32768, .rope_theta = 10000.0, .norm_eps = 1e-6},
      .has_experts = true,
      .presets = qwen3_moe_presets(),
      .read = read_qwen3_moe,
      .write = write_qwen3_moe,
      .check = check_plain_experts};
  return family;
}

}  // namespace flatshard::models
