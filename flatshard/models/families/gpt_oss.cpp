#include "flatshard/models/families/family.h"
#include "flatshard/models/families/hf_windows.h"
#include "flatshard/nn/swiglu.h"
#include "flatshard/ops/clamped_silu.h"

// gpt-oss. Source: arXiv:2508.10925.
namespace flatshard::models {
namespace {

constexpr std::int64_t kGptOssWindow = 128;
constexpr const char* kRopeScaling = "rope_scaling";

ModelConfig gpt_oss_defaults() {
  constexpr double kStretch = 32.0;
  return {
      .family = "gpt_oss",
      .dim = 2880,
      .layers = 24,
      .heads = 64,
      .kv_heads = 8,
      .head_dim = 64,
      .ffn_dim = 2880,
      .vocab_size = 201088,
      .max_seq_len = 131072,
      .rope_theta = 150000.0,
      .rope_scaling =
          nn::RopeScaling{
              .type = nn::RopeType::yarn,
              .factor = kStretch,
              .original_max_positions = 4096,
              .truncate = false,
              .attention_factor = nn::yarn_attention_factor(kStretch)},
      .block =
          {.activation = nn::GateActivation::clamped_silu,
           .mlp_bias = true,
           .expert_layout = nn::ExpertLayout::interleaved,
           .attention =
               {.qkv_bias = true,
                .output_bias = true,
                .window = kGptOssWindow,
                .window_pattern = {true, false},
                .sinks = true}},
      .moe = {.num_experts = 32, .experts_per_token = 4}};
}

std::vector<Preset> gpt_oss_presets() {
  ModelConfig large = gpt_oss_defaults();
  large.layers = 36;
  large.moe.num_experts = 128;
  ModelConfig tiny = gpt_oss_defaults();
  tiny.dim = 64;
  tiny.layers = 2;
  tiny.heads = 4;
  tiny.kv_heads = 2;
  tiny.head_dim = 32;
  tiny.ffn_dim = 96;
  tiny.vocab_size = 257;
  tiny.max_seq_len = 256;
  tiny.rope_scaling.reset();
  tiny.block.attention.window = 32;
  tiny.moe = {.num_experts = 4, .experts_per_token = 2};
  return {
      {"gpt_oss_20b", gpt_oss_defaults()},
      {"gpt_oss_120b", large},
      {"gpt_oss_tiny", tiny}};
}

void read_gpt_oss(const HfReader& reader, ModelConfig& config) {
  reader.expect<bool>("attention_bias", true);
  reader.expect<double>("swiglu_limit", nn::kClampedSiluLimit);
  if (reader.has("quantization_config")) {
    // HfFolder reads these tensors.
    reader.inside("quantization_config")
        .expect<std::string>("quant_method", "mxfp4");
  }
  config.block.attention.window =
      reader.get<std::int64_t>("sliding_window", kGptOssWindow);
  read_windows(reader, config, [](std::int64_t layer) {
    return layer % 2 == 0;
  });
  config.moe = {
      .num_experts = reader.need<std::int64_t>("num_local_experts"),
      .experts_per_token = reader.need<std::int64_t>("num_experts_per_tok")};
  // Without the key, transformers uses the values of the public models.
  if (reader.has(kRopeScaling) || reader.is_null(kRopeScaling) ||
      reader.has("rope_parameters")) {
    config.rope_scaling.reset();
  }
}

void write_gpt_oss(const ModelConfig& config, nlohmann::ordered_json& json) {
  const std::int64_t window = config.block.attention.window;
  json["attention_bias"] = true;
  json["swiglu_limit"] = nn::kClampedSiluLimit;
  json["sliding_window"] = window > 0 ? window : kGptOssWindow;
  write_layer_types(config, json);
  json["num_local_experts"] = config.moe.num_experts;
  json["num_experts_per_tok"] = config.moe.experts_per_token;
  if (!config.rope_scaling) {
    json[kRopeScaling] = nullptr;
  }
}

}  // namespace

const Family& gpt_oss_family() {
  static const Family family{
      .name = "gpt_oss",
      .model_type = "gpt_oss",
      .architecture = "GptOssForCausalLM",
      .defaults = gpt_oss_defaults(),
      .absent =
          {.head_dim = 64,
           .max_seq_len = 131072,
           .rope_theta = 150000.0,
           .norm_eps = 1e-5},
      .free_keys = {"sliding_window", "sliding_window_pattern"},
      .has_experts = true,
      .names =
          {.renames = {{".mlp.gate.", ".mlp.router."}},
           .experts =
               {.together = true,
                .gate = "gate_up_proj",
                .up = "gate_up_proj",
                .router = "router"}},
      .presets = gpt_oss_presets(),
      .read = read_gpt_oss,
      .write = write_gpt_oss,
      .check = check_uniform_experts};
  return family;
}

}  // namespace flatshard::models
