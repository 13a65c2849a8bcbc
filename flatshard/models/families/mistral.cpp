#include "flatshard/models/families/family.h"

// Mistral 7B and its successors. Source: arXiv:2310.06825.
namespace flatshard::models {
namespace {

std::vector<Preset> mistral_presets() {
  return {
      {"mistral_7b_v0_1",
       {.family = "mistral",
        .vocab_size = 32000,
        .max_seq_len = 32768,
        .rope_theta = 10000.0,
        .block = {.attention = {.window = 4096}}}},
      {"mistral_7b_v0_3",
       {.family = "mistral",
        .vocab_size = 32768,
        .max_seq_len = 32768,
        .rope_theta = 1e6}},
      {"mistral_nemo_12b",
       {.family = "mistral",
        .dim = 5120,
        .layers = 40,
        .head_dim = 128,
        .vocab_size = 131072,
        .max_seq_len = 131072,
        .rope_theta = 1e6}},
  };
}

void read_mistral(const HfReader& reader, ModelConfig& config) {
  config.block.attention.window =
      reader.is_null("sliding_window")
          ? 0
          : reader.get<std::int64_t>("sliding_window", 4096);
}

void write_mistral(const ModelConfig& config, nlohmann::ordered_json& json) {
  const std::int64_t window = config.block.attention.window;
  json["sliding_window"] = nullptr;
  if (window > 0) {
    json["sliding_window"] = window;
  }
}

}  // namespace

const Family& mistral_family() {
  static const Family family{
      .name = "mistral",
      .model_type = "mistral",
      .architecture = "MistralForCausalLM",
      .defaults = {.family = "mistral", .rope_theta = 1e6},
      .absent =
          {.max_seq_len = 131072, .rope_theta = 10000.0, .norm_eps = 1e-6},
      .free_keys = {"sliding_window"},
      .presets = mistral_presets(),
      .read = read_mistral,
      .write = write_mistral};
  return family;
}

}  // namespace flatshard::models
