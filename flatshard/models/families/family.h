#pragma once

#include "flatshard/models/config.h"
#include "flatshard/models/families/hf_reader.h"

#include <nlohmann/json.hpp>

#include <span>
#include <string_view>
#include <vector>

namespace flatshard::models {

/// A part of a parameter's name here, and in files.
struct Rename {
  std::string_view ours;
  std::string_view theirs;
};

/// The names of one expert's matrices in files.
struct ExpertNames {
  /// All experts of a block are one tensor, as here, and these names its.
  bool together = false;
  std::string_view gate = "gate_proj";
  std::string_view up = "up_proj";
  std::string_view down = "down_proj";
  std::string_view router = "gate";
};

/// Some rows of a matrix in files.
struct FusedPart {
  std::string_view ours;  ///< our parameter of these rows
  std::int64_t (*rows)(const ModelConfig&);
};

/// A matrix in files that is several parameters here, one below another.
struct FusedTensor {
  std::string_view theirs;
  std::vector<FusedPart> parts;
};

/// Differences between stored names and Flatshard's names, within a block.
struct FamilyNames {
  std::vector<Rename> renames;
  ExpertNames experts;
  std::vector<FusedTensor> fused;
};

struct Preset {
  std::string_view name;
  ModelConfig config;
};

/// A family of models. Each is defined in a separate file of this folder, and
/// nothing outside that file asks which family a model has.
struct Family {
  std::string_view name;  ///< model.family
  /// `model_type` of config.json; empty: no config.json describes the family.
  std::string_view model_type;
  std::string_view architecture;                   ///< e.g. "LlamaForCausalLM"
  std::string_view activation_key = "hidden_act";  ///< key in config.json
  /// The values of [model] without a preset.
  ModelConfig defaults;
  /// transformers' values for keys that a config.json leaves out: max_seq_len,
  /// rope_theta, norm_eps and tie_embeddings.
  ModelConfig absent;
  /// Keys of [model] that a model of the family may set. The options of other
  /// keys come from `defaults`.
  std::vector<std::string_view> free_keys;
  /// The ways in which transformers stretches rotations of the family.
  std::vector<nn::RopeType> rope_types{
      nn::RopeType::llama3,
      nn::RopeType::linear,
      nn::RopeType::dynamic,
      nn::RopeType::yarn};
  bool has_experts = false;
  FamilyNames names;
  std::vector<Preset> presets;
  /// Reads family-specific keys, in addition to the keys that all families
  /// have; null if there are none.
  void (*read)(const HfReader& reader, ModelConfig& config) = nullptr;
  /// Writes what `read` reads; null: nothing.
  void (*write)(const ModelConfig& config, nlohmann::ordered_json& json) =
      nullptr;
  /// Checks more than `free_keys` can; null: nothing.
  /// @throws Error{config} naming the key.
  void (*check)(const ModelConfig& config) = nullptr;

  bool has_config_json() const { return !model_type.empty(); }
};

/// Returns all families, in the order in which users read them.
std::span<const Family* const> families();
/// Returns the family of a name; null for an unknown one.
const Family* find_family(std::string_view name);
/// Returns the family of a model. @throws Error{config} listing all.
const Family& family_of(const ModelConfig& config);

/// @throws Error{config} that names the key, what the family supports and what
/// to do instead, if `found`.
void refuse_key(
    const ModelConfig& config,
    bool found,
    const char* key,
    const char* what);
/// Rejects what only the family moe supports: shared experts, and routers other
/// than top-k over all softmax scores.
void check_plain_experts(const ModelConfig& config);
/// check_plain_experts; also requires experts of width ffn_dim in every block,
/// with weights that add up to 1 for each token.
void check_uniform_experts(const ModelConfig& config);
/// Checks that the family supports the experts, and each option that is not in
/// its `free_keys`.
void check_family(const ModelConfig& config);

/// Sets the biases of AttentionOptions from attention_bias. It covers all four
/// projections of a block.
void read_attention_bias(const HfReader& reader, ModelConfig& config);

// All families, in the order in which users read them. A file in this folder
// defines llama_family(), another qwen2_family(), and so on. No config.json
// describes the family moe: its experts may have any router.
#define FLATSHARD_FAMILIES(FAMILY) \
  FAMILY(llama)                    \
  FAMILY(qwen2)                    \
  FAMILY(qwen3)                    \
  FAMILY(mistral)                  \
  FAMILY(olmo2)                    \
  FAMILY(phi3)                     \
  FAMILY(gemma2)                   \
  FAMILY(gemma3)                   \
  FAMILY(mixtral)                  \
  FAMILY(qwen3_moe)                \
  FAMILY(gpt_oss)                  \
  FAMILY(moe)

#define FLATSHARD_DECLARE_FAMILY(name) const Family& name##_family();
FLATSHARD_FAMILIES(FLATSHARD_DECLARE_FAMILY)
#undef FLATSHARD_DECLARE_FAMILY

}  // namespace flatshard::models
