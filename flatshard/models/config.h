#pragma once

#include "flatshard/models/block_options.h"
#include "flatshard/moe/router_args.h"
#include "flatshard/nn/rope.h"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard::models {

/// Experts in place of the feed-forward part of blocks. A leaf value.
struct MoeConfig {
  std::int64_t num_experts = 0;  ///< 0: none, all blocks are dense
  std::int64_t experts_per_token = 2;
  std::int64_t ffn_dim = 0;  ///< per expert; 0: ModelConfig::ffn_dim
  /// Experts that process every token: one feed-forward part with this many
  /// times ffn_dim.
  std::int64_t shared_experts = 0;
  std::int64_t dense_layers = 0;  ///< number of first blocks without experts
  nn::RouterScore router_score = nn::RouterScore::softmax;
  bool router_normalize = true;
  double router_scale = 1.0;
  std::int64_t router_groups = 1;
  std::int64_t router_kept_groups = 1;
  /// The choice of experts adds a bias that training updates to balance loads.
  bool router_bias = false;

  bool operator==(const MoeConfig&) const = default;
};

/// Shape of a decoder-only transformer. A leaf value.
struct ModelConfig {
  /// One of family_names().
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
  /// Blocks with a window rotate by this base and without rope_scaling; 0: as
  /// the others do.
  double local_rope_theta = 0.0;
  double partial_rotary_factor = 1.0;  ///< fraction of a head that is rotated
  double norm_eps = 1e-5;
  /// Standard deviation of matrices that are trained from scratch; see init.h.
  double initializer_range = 0.02;
  bool tie_embeddings = false;
  bool scale_embeddings = false;  ///< by sqrt(dim)
  double final_soft_cap = 0.0;    ///< for logits; 0: none
  BlockOptions block;
  MoeConfig moe;

  /// Returns whether this block has experts.
  bool has_experts(std::int64_t layer) const {
    return moe.num_experts > 0 && layer >= moe.dense_layers;
  }

  std::int64_t rotary_dim() const;

  /// Fills head_dim and moe.ffn_dim and checks every field.
  /// @throws Error{config} naming the field.
  void validate();

  bool operator==(const ModelConfig&) const = default;
};

/// Checks that `size` ranks can share the layers of a model.
/// @param option  that gave their number, for the message.
/// @throws Error{config} naming the size that they do not divide.
void check_tensor_parallel(
    const ModelConfig& config,
    std::int64_t size,
    std::string_view option);
/// Checks that `size` ranks can share the tokens of a batch by an exchange of
/// heads.
/// @param tensor_ranks  among which the heads are split as well.
/// @param option        as above
/// @throws Error{config} naming the number of heads that they do not divide.
void check_context_parallel(
    const ModelConfig& config,
    std::int64_t size,
    std::int64_t tensor_ranks,
    std::string_view option);

/// Families, as model.family names them; docs/reference/families.md has a table
/// of them.
std::vector<std::string_view> family_names();
/// Returns the shape of a family where no preset and no config.json gives it.
/// @throws Error{config} for an unknown family.
ModelConfig family_defaults(std::string_view name);

/// Returns the names of `preset`, by family.
std::vector<std::string_view> preset_names();
/// @throws Error{config} for another name.
ModelConfig preset(std::string_view name);

/// Reads a Hugging Face config.json of any family.
/// @throws Error{io} if it cannot be read, and Error{format} if it is not JSON
/// or a field is missing or of the wrong type. Error{config} means an
/// architecture or a setting that is not supported.
ModelConfig from_hf_json(const std::filesystem::path& path);

/// The ids of a tokenizer that a model's files name.
struct SpecialTokens {
  std::optional<std::int64_t> bos;  ///< starts a text
  std::vector<std::int64_t> eos;    ///< each ends one
  std::optional<std::int64_t> pad;

  bool operator==(const SpecialTokens&) const = default;
};

/// bos_token_id, eos_token_id and pad_token_id of a config.json.
/// @throws Error{io}, Error{format} as `from_hf_json`.
SpecialTokens special_tokens_from_hf_json(const std::filesystem::path& path);

/// Returns the content of a config.json for weights of this shape, in a form
/// that `from_hf_json` and transformers read.
/// @param dtype  torch's name of the weights' dtype, e.g. "bfloat16".
/// @param tokens  unset ones are written as null: without the key, transformers
///   would use its own default ids.
/// @throws Error{config} for the family moe.
std::string to_hf_json(
    const ModelConfig& config,
    std::string_view dtype,
    const SpecialTokens& tokens = {});

/// Returns the content of a generation_config.json: the tokens that `generate`
/// of transformers puts before a text and stops at.
std::string to_generation_json(const SpecialTokens& tokens);

}  // namespace flatshard::models
