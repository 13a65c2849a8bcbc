#pragma once

#include "flatshard/nn/rope.h"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard::models {

/// Shape of a decoder-only transformer. A leaf value.
struct ModelConfig {
  std::string family = "llama";
  std::int64_t dim = 4096;
  std::int64_t layers = 32;
  std::int64_t heads = 32;
  std::int64_t kv_heads = 8;
  std::int64_t head_dim = 0;  ///< 0: dim / heads; see validate()
  std::int64_t ffn_dim = 14336;
  std::int64_t vocab_size = 128256;
  std::int64_t max_seq_len = 8192;
  double rope_theta = 500000.0;
  std::optional<nn::RopeScaling> rope_scaling;
  double norm_eps = 1e-5;
  bool tie_embeddings = false;

  /// Fills head_dim and checks every field.
  /// @throws Error{config} naming the field.
  void validate();

  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;
};

/// Names that `preset` knows: llama3_1b, llama3_3b, llama3_8b, llama3_70b,
/// llama3_405b.
std::vector<std::string_view> preset_names();
/// @throws Error{config} for another name.
ModelConfig preset(std::string_view name);

/// Reads a Hugging Face config.json of LlamaForCausalLM.
/// @throws Error{io} when it cannot be read, Error{format} when it is no JSON
/// or a field is missing or of the wrong type, Error{config} for an
/// architecture or a setting that is not supported (biases, other activations,
/// other rope types).
ModelConfig from_hf_json(const std::filesystem::path& path);

/// The ids of a tokenizer that a model's files name.
struct SpecialTokens {
  std::optional<std::int64_t> bos;  ///< begins a text
  std::vector<std::int64_t> eos;    ///< each ends one
  std::optional<std::int64_t> pad;

  friend bool operator==(const SpecialTokens&, const SpecialTokens&) = default;
};

/// bos_token_id, eos_token_id and pad_token_id of a config.json.
/// @throws Error{io}, Error{format} as `from_hf_json`.
SpecialTokens special_tokens_from_hf_json(const std::filesystem::path& path);

/// The content of a config.json for weights of this shape, which `from_hf_json`
/// and transformers read.
/// @param dtype  torch's name of the weights' dtype, e.g. "bfloat16".
/// @param tokens  those that are unset are null: without the key transformers
///   would take ids of its own.
std::string to_hf_json(
    const ModelConfig& config,
    std::string_view dtype,
    const SpecialTokens& tokens = {});

/// The content of a generation_config.json, which `generate` of transformers
/// begins and ends texts by.
std::string to_generation_json(const SpecialTokens& tokens);

}  // namespace flatshard::models
