#include "flatshard/models/families/family.h"

#include "flatshard/core/error.h"
#include "flatshard/core/nearest_name.h"

#include <fmt/ranges.h>

#include <algorithm>

namespace flatshard::models {
namespace {

struct FixedOption {
  const char* key;
  bool (*equal)(const ModelConfig&, const ModelConfig&);
};

#define OPTION(key, member)                               \
  {                                                       \
    key, [](const ModelConfig& a, const ModelConfig& b) { \
      return a.member == b.member;                        \
    }                                                     \
  }

constexpr FixedOption kOptions[] = {
    OPTION("attention_bias", block.attention.qkv_bias),
    OPTION("attention_bias", block.attention.output_bias),
    OPTION("mlp_bias", block.mlp_bias),
    OPTION("qk_norm", block.attention.qk_norm),
    OPTION("sliding_window", block.attention.window),
    OPTION("sliding_window_pattern", block.attention.window_pattern),
    OPTION("query_pre_attn_scalar", block.attention.query_pre_attn_scalar),
    OPTION("attention_soft_cap", block.attention.soft_cap),
    OPTION("attention_sinks", block.attention.sinks),
    OPTION("final_soft_cap", final_soft_cap),
    OPTION("local_rope_theta", local_rope_theta),
    OPTION("partial_rotary_factor", partial_rotary_factor),
};

#undef OPTION

}  // namespace

std::span<const Family* const> families() {
#define ADDRESS_OF(name) &name##_family(),
  static const Family* const kFamilies[] = {FLATSHARD_FAMILIES(ADDRESS_OF)};
#undef ADDRESS_OF
  return kFamilies;
}

const Family* find_family(std::string_view name) {
  const auto all = families();
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const Family* family) {
        return family->name == name;
      });
  return found == all.end() ? nullptr : *found;
}

const Family& family_of(const ModelConfig& config) {
  FLATSHARD_CHECK(
      config.family != "deepseek_v3",
      config,
      "model.family: deepseek_v3 is not supported, because it has multi-head "
      "latent attention; the family moe has its router with grouped-query "
      "attention");
  const Family* const family = find_family(config.family);
  FLATSHARD_CHECK(
      family != nullptr,
      config,
      "model.family: expected one of {}, got '{}'; it is not supported",
      fmt::join(family_names(), ", "),
      config.family);
  return *family;
}

void refuse_key(
    const ModelConfig& config,
    bool found,
    const char* key,
    const char* what) {
  FLATSHARD_CHECK(
      !found,
      config,
      "model.{}: the family {} has {}; remove the key, or use the family moe",
      key,
      config.family,
      what);
}

void check_plain_experts(const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  refuse_key(
      config,
      moe.shared_experts > 0,
      "shared_experts",
      "no shared experts");
  refuse_key(
      config,
      moe.router_score != nn::RouterScore::softmax,
      "router_score",
      "softmax scores");
  refuse_key(config, moe.router_scale != 1.0, "router_scale", "none");
  refuse_key(
      config,
      moe.router_groups != 1,
      "router_groups",
      "no groups of experts");
  refuse_key(
      config,
      moe.router_bias,
      "router_bias (moe.balance_rate)",
      "no bias of the router");
}

void check_uniform_experts(const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  check_plain_experts(config);
  refuse_key(
      config,
      !moe.router_normalize,
      "router_normalize",
      "weights that add up to 1");
  refuse_key(
      config,
      moe.dense_layers > 0,
      "dense_layers",
      "experts in every block");
  refuse_key(
      config,
      moe.ffn_dim != config.ffn_dim,
      "moe_ffn_dim",
      "one ffn_dim");
}

void check_family(const ModelConfig& config) {
  const Family& family = family_of(config);
  const std::int64_t experts = config.moe.num_experts;
  refuse_key(
      config,
      !family.has_experts && experts > 0,
      "num_experts",
      "no experts");
  FLATSHARD_CHECK(
      !family.has_experts || experts > 0,
      config,
      "model.num_experts: the family {} expected at least 1, got {}",
      config.family,
      experts);
  for (const FixedOption& option : kOptions) {
    const auto& free = family.free_keys;
    FLATSHARD_CHECK(
        std::find(free.begin(), free.end(), option.key) != free.end() ||
            option.equal(config, family.defaults),
        config,
        "model.{}: all models of the family {} have the same value; remove "
        "the key, or use another family",
        option.key,
        config.family);
  }
  const auto& types = family.rope_types;
  FLATSHARD_CHECK(
      !config.rope_scaling ||
          std::find(types.begin(), types.end(), config.rope_scaling->type) !=
              types.end(),
      config,
      "model.rope_scaling: models of the family {} do not support it; remove "
      "the key, or use another method",
      config.family);
  if (family.check != nullptr) {
    family.check(config);
  }
}

void read_attention_bias(const HfReader& reader, ModelConfig& config) {
  const bool bias = reader.get<bool>("attention_bias", false);
  config.block.attention.qkv_bias = bias;
  config.block.attention.output_bias = bias;
}

std::vector<std::string_view> family_names() {
  std::vector<std::string_view> names;
  for (const Family* family : families()) {
    names.push_back(family->name);
  }
  return names;
}

ModelConfig family_defaults(std::string_view name) {
  return family_of({.family = std::string(name)}).defaults;
}

std::vector<std::string_view> preset_names() {
  std::vector<std::string_view> names;
  for (const Family* family : families()) {
    for (const Preset& preset : family->presets) {
      names.push_back(preset.name);
    }
  }
  return names;
}

ModelConfig preset(std::string_view name) {
  for (const Family* family : families()) {
    for (const Preset& preset : family->presets) {
      if (preset.name == name) {
        ModelConfig found = preset.config;
        found.validate();
        return found;
      }
    }
  }
  const std::string near = near_name(name, preset_names());
  FLATSHARD_THROW(
      config,
      "expected a model preset, one of {}, got '{}'{}",
      fmt::join(preset_names(), ", "),
      name,
      near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
}

}  // namespace flatshard::models
