#include "flatshard/train/model_config.h"

#include "flatshard/core/error.h"
#include "flatshard/train/option_errors.h"

namespace flatshard {
namespace {

template <class T, class U>
void override_with(T& value, const std::optional<U>& key) {
  if (key) {
    value = static_cast<T>(*key);
  }
}

}  // namespace

models::ModelConfig model_config(const Config& config) {
  const Config::Model& m = config.model;
  FLATSHARD_CHECK(
      m.family == "llama",
      config,
      "model.family: expected llama, got '{}'",
      m.family);
  models::ModelConfig model;
  FLATSHARD_CHECK(
      m.preset.empty() || m.hf_config.empty(),
      config,
      "expected one of model.preset and model.hf_config, got both");
  if (!m.preset.empty()) {
    model =
        for_option("model.preset", [&] { return models::preset(m.preset); });
  } else if (!m.hf_config.empty()) {
    model = for_option("model.hf_config", [&] {
      return models::from_hf_json(m.hf_config);
    });
  } else if (!m.init_from.empty() && !m.dim) {
    model = for_option("model.init_from", [&] {
      return models::from_hf_json(
          std::filesystem::path(m.init_from) / "config.json");
    });
  } else {
    FLATSHARD_CHECK(
        m.dim && m.layers && m.heads && m.ffn_dim && m.vocab_size,
        config,
        "expected model.preset, model.hf_config, or all of model.dim, "
        "model.layers, model.heads, model.ffn_dim and model.vocab_size");
    model.kv_heads = *m.heads;
    model.head_dim = 0;
    model.max_seq_len = config.training.seq_len;
  }
  override_with(model.dim, m.dim);
  override_with(model.layers, m.layers);
  override_with(model.heads, m.heads);
  override_with(model.kv_heads, m.kv_heads);
  override_with(model.head_dim, m.head_dim);
  override_with(model.ffn_dim, m.ffn_dim);
  override_with(model.vocab_size, m.vocab_size);
  override_with(model.max_seq_len, m.max_seq_len);
  override_with(model.rope_theta, m.rope_theta);
  override_with(model.norm_eps, m.norm_eps);
  override_with(model.tie_embeddings, m.tie_embeddings);
  model.validate();
  FLATSHARD_CHECK(
      config.training.seq_len <= model.max_seq_len,
      config,
      "training.seq_len: expected at most model.max_seq_len = {}, got {}",
      model.max_seq_len,
      config.training.seq_len);
  return model;
}

}  // namespace flatshard
