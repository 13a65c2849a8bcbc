#include "flatshard/models/families/hf_rope.h"

#include <cmath>
#include <string>

namespace flatshard::models {
namespace {

using nn::RopeScaling;
using nn::RopeType;

constexpr const char* kOriginal = "original_max_position_embeddings";

std::string rope_type_of(const HfReader& rope) {
  return rope.has("rope_type") ? rope.need<std::string>("rope_type")
                               : rope.get<std::string>("type", "default");
}

RopeScaling read_llama3(const HfReader& rope) {
  return {
      .type = RopeType::llama3,
      .factor = rope.need<double>("factor"),
      .low_freq_factor = rope.need<double>("low_freq_factor"),
      .high_freq_factor = rope.need<double>("high_freq_factor"),
      .original_max_positions = rope.need<std::int64_t>(kOriginal)};
}

double mscale(double factor, double weight) {
  return factor <= 1.0 ? 1.0 : 0.1 * weight * std::log(factor) + 1.0;
}

RopeScaling read_yarn(const HfReader& rope, const ModelConfig& config) {
  RopeScaling scaling{
      .type = RopeType::yarn,
      .factor = rope.need<double>("factor"),
      .original_max_positions =
          rope.get<std::int64_t>(kOriginal, config.max_seq_len),
      .beta_fast = rope.get<double>("beta_fast", 32.0),
      .beta_slow = rope.get<double>("beta_slow", 1.0),
      .truncate = rope.get<bool>("truncate", true)};
  const double over = rope.get<double>("mscale", 0.0);
  const double under = rope.get<double>("mscale_all_dim", 0.0);
  scaling.attention_factor = rope.get<double>(
      "attention_factor",
      over != 0.0 && under != 0.0
          ? mscale(scaling.factor, over) / mscale(scaling.factor, under)
          : nn::yarn_attention_factor(scaling.factor));
  return scaling;
}

RopeScaling read_longrope(
    const HfReader& reader,
    const HfReader& rope,
    const ModelConfig& config) {
  const auto original = rope.get<std::int64_t>(
      kOriginal,
      reader.get<std::int64_t>(kOriginal, config.max_seq_len));
  const double factor =
      static_cast<double>(config.max_seq_len) / static_cast<double>(original);
  RopeScaling scaling{
      .type = RopeType::longrope,
      .factor = std::max(factor, 1.0),
      .original_max_positions = original,
      .short_factors = rope.need<std::vector<double>>("short_factor"),
      .long_factors = rope.need<std::vector<double>>("long_factor")};
  scaling.attention_factor = rope.get<double>(
      "attention_factor",
      factor <= 1.0 ? 1.0
                    : std::sqrt(
                          1.0 + std::log(factor) /
                                    std::log(static_cast<double>(original))));
  return scaling;
}

void read_one(
    const HfReader& reader,
    const HfReader& rope,
    ModelConfig& config) {
  config.rope_theta = rope.get<double>("rope_theta", config.rope_theta);
  config.partial_rotary_factor =
      rope.get<double>("partial_rotary_factor", config.partial_rotary_factor);
  const std::string type = rope_type_of(rope);
  if (type == "llama3") {
    config.rope_scaling = read_llama3(rope);
  } else if (type == "linear") {
    config.rope_scaling = RopeScaling{
        .type = RopeType::linear,
        .factor = rope.need<double>("factor"),
        .original_max_positions = config.max_seq_len};
  } else if (type == "dynamic") {
    const auto factor = rope.need<double>("factor");
    rope.expect<std::int64_t>(kOriginal, config.max_seq_len);
    config.rope_scaling = RopeScaling{
        .type = RopeType::dynamic,
        .factor = factor,
        .original_max_positions = config.max_seq_len};
    // RoPE scaling extends the context beyond the original length.
    config.max_seq_len = static_cast<std::int64_t>(
        factor * static_cast<double>(config.max_seq_len));
  } else if (type == "yarn") {
    config.rope_scaling = read_yarn(rope, config);
  } else if (type == "longrope" || type == "su") {
    config.rope_scaling = read_longrope(reader, rope, config);
  } else {
    FLATSHARD_CHECK(
        type == "default",
        config,
        "{}: expected a rope_type of 'default', 'llama3', 'linear', 'dynamic', "
        "'yarn' or 'longrope', got '{}'; it is not supported",
        rope.file(),
        type);
  }
}

}  // namespace

void read_rope(const HfReader& reader, ModelConfig& config) {
  config.partial_rotary_factor =
      reader.get<double>("partial_rotary_factor", config.partial_rotary_factor);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!reader.has(key)) {
      continue;
    }
    const HfReader rope = reader.inside(key);
    constexpr const char* kFull = "full_attention";
    constexpr const char* kWindow = "sliding_attention";
    if (!rope.has(kFull)) {
      read_one(reader, rope, config);
      continue;
    }
    read_one(reader, rope.inside(kFull), config);
    if (rope.has(kWindow) && config.block.attention.window > 0) {
      const HfReader local = rope.inside(kWindow);
      local.expect<std::string>("rope_type", "default");
      config.local_rope_theta =
          local.get<double>("rope_theta", config.local_rope_theta);
    }
  }
}

void write_rope(const ModelConfig& config, nlohmann::ordered_json& json) {
  json["rope_theta"] = config.rope_theta;
  if (config.partial_rotary_factor != 1.0) {
    json["partial_rotary_factor"] = config.partial_rotary_factor;
  }
  if (!config.rope_scaling) {
    return;
  }
  const RopeScaling& scaling = *config.rope_scaling;
  nlohmann::ordered_json& rope = json["rope_scaling"];
  switch (scaling.type) {
    case RopeType::llama3:
      rope = {
          {"rope_type", "llama3"},
          {"factor", scaling.factor},
          {"low_freq_factor", scaling.low_freq_factor},
          {"high_freq_factor", scaling.high_freq_factor},
          {kOriginal, scaling.original_max_positions}};
      break;
    case RopeType::linear:
      rope = {{"rope_type", "linear"}, {"factor", scaling.factor}};
      break;
    case RopeType::dynamic:
      rope = {{"rope_type", "dynamic"}, {"factor", scaling.factor}};
      // transformers stretches from there on.
      json["max_position_embeddings"] = scaling.original_max_positions;
      break;
    case RopeType::yarn:
      rope = {
          {"rope_type", "yarn"},
          {"factor", scaling.factor},
          {kOriginal, scaling.original_max_positions},
          {"beta_fast", scaling.beta_fast},
          {"beta_slow", scaling.beta_slow},
          {"attention_factor", scaling.attention_factor}};
      if (!scaling.truncate) {
        rope["truncate"] = false;
      }
      break;
    case RopeType::longrope:
      rope = {
          {"type", "longrope"},
          {"short_factor", scaling.short_factors},
          {"long_factor", scaling.long_factors}};
      json[kOriginal] = scaling.original_max_positions;
      // Their ratio is the factor.
      json["max_position_embeddings"] = std::llround(
          scaling.factor * static_cast<double>(scaling.original_max_positions));
      break;
  }
}

}  // namespace flatshard::models
