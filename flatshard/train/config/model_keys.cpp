#include "flatshard/train/config/model_keys.h"

#include "flatshard/core/error.h"
#include "flatshard/models/config.h"
#include "flatshard/train/config/key_rows.h"

namespace flatshard::config {
namespace {

/// Returns whether both are set and `whole` is not a multiple of `part`.
bool leaves_rest(
    const std::optional<std::int64_t>& whole,
    const std::optional<std::int64_t>& part) {
  return whole && part && *whole % *part != 0;
}

std::vector<std::string_view> family_choices() {
  std::vector<std::string_view> choices{"auto"};
  for (const std::string_view name : models::family_names()) {
    choices.push_back(name);
  }
  return choices;
}

/// Returns whether [model] chooses a scaling of rotations that has a factor.
bool scales_rope(const Config& c) {
  return c.model.rope_scaling != RopeScalingChoice::from_shape &&
         c.model.rope_scaling != RopeScalingChoice::none;
}

const ConfigKey kModelKeys[] = {
#define KEY(...) KEY_ROW(model, __VA_ARGS__)
#include "flatshard/train/config/sections/model.def"
#define KEY(...) KEY_ROW(moe, __VA_ARGS__)
#include "flatshard/train/config/sections/moe.def"
};

void check_model(const Config& config) {
  const Model& model = config.model;
  FLATSHARD_CHECK(
      !scales_rope(config) || model.rope_factor,
      config,
      "model.rope_scaling = \"{}\" needs model.rope_factor, how many times "
      "longer sequences become; set it, e.g. 4.0",
      word_of(model.rope_scaling));
  // Without any of the others init_from's config.json defines the shape.
  if (model.hf_config.empty() && model.preset.empty() &&
      (model.init_from.empty() || model.dim)) {
    FLATSHARD_CHECK(
        model.dim && model.layers && model.heads && model.ffn_dim &&
            model.vocab_size,
        config,
        "[model] needs dim, layers, heads, ffn_dim and vocab_size, or preset, "
        "or hf_config; '{}' is missing",
        !model.dim       ? "dim"
        : !model.layers  ? "layers"
        : !model.heads   ? "heads"
        : !model.ffn_dim ? "ffn_dim"
                         : "vocab_size");
  }
}

}  // namespace

KeyTable model_keys() {
  return {kModelKeys, check_model};
}

}  // namespace flatshard::config
