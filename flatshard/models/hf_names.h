#pragma once

#include "flatshard/core/stored_entry.h"
#include "flatshard/models/config.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard::models {

// Parameters have Hugging Face's names, except for
// - the final norm. It belongs to the head module (one unit):
//   `lm_head.norm.weight` here and `model.norm.weight` there;
// - experts. They are one tensor here, as in memory of transformers 5:
//   `mlp.experts.gate_up_proj` [E, 2 f, d] and `mlp.experts.down_proj`
//   [E, d, f]. There each expert is an entry: `mlp.experts.N.gate_proj.weight`
//   and so on, in Mixtral `block_sparse_moe.experts.N.w1.weight`;
// - norms after attention and the feed-forward part, `self_attn.post_norm` and
//   `mlp.post_norm` here, and matrices that a family has in one there: see
//   FamilyNames in families/family.h.

/// Returns Hugging Face's entries of one parameter: its slices along the first
/// dimensions, in order, or rows of a tensor that several parameters share.
std::vector<StoredEntry> hf_entries(
    const ModelConfig& config,
    const std::string& name,
    const std::vector<std::int64_t>& shape);

/// Prefix of the names of a model's tensors, except for tensors of its head.
inline constexpr std::string_view kHfBasePrefix = "model.";

/// Returns whether a Hugging Face folder's tensor without a parameter here has
/// no effect on the model's outputs. Such tensors are buffers that are
/// recomputed (rotary embeddings, causal masks), scales of a KV cache, and
/// counters. Others belong to other modules than the model and its head, such
/// as heads of other tasks.
bool is_unneeded_hf_entry(std::string_view name, std::size_t num_dims);

/// Returns the N of an entry of block N, "model.layers.N.*"; unset for others.
std::optional<std::int64_t> layer_of_hf_entry(std::string_view name);

/// hf_entries of one model.
StoredEntriesOf hf_entries_of(const ModelConfig& config);

/// Hugging Face's name of a parameter that is one entry.
std::string to_hf_name(std::string_view name);

}  // namespace flatshard::models
