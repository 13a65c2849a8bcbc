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

// Our parameter names are Hugging Face's, but for
// - the final norm, which belongs to the head module (one unit):
//   `lm_head.norm.weight` here and `model.norm.weight` there;
// - experts, which are one tensor here (`mlp.experts.gate_up_proj` [E, 2 f, d]
//   and `mlp.experts.down_proj` [E, d, f], as transformers 5 has them in
//   memory) and one entry for each expert there:
//   `mlp.experts.N.gate_proj.weight` and so on, in Mixtral
//   `block_sparse_moe.experts.N.w1.weight`;
// - norms behind attention and the feed-forward part, `self_attn.post_norm` and
//   `mlp.post_norm` here, and matrices that a family has in one there: see
//   FamilyNames in families/family.h.

/// Hugging Face's entries of one of our parameters: its slices along the first
/// dimensions, in order, or rows of a tensor that several parameters share.
std::vector<StoredEntry> hf_entries(
    const ModelConfig& config,
    const std::string& name,
    const std::vector<std::int64_t>& shape);

/// What the names of a model begin with that is not its head's.
inline constexpr std::string_view kHfBasePrefix = "model.";

/// Whether a tensor of a Hugging Face folder that is no parameter of ours
/// changes nothing that the model computes: buffers that are computed anew
/// (rotary embeddings, causal masks), scales of a KV cache, counters, and what
/// belongs to other modules than the model and its head (heads of other tasks).
bool is_unneeded_hf_entry(std::string_view name, std::size_t num_dims);

/// The N of an entry of block N, "model.layers.N.*"; unset for others.
std::optional<std::int64_t> layer_of_hf_entry(std::string_view name);

/// hf_entries of one model.
StoredEntriesOf hf_entries_of(const ModelConfig& config);

/// Hugging Face's name of a parameter that is one entry.
std::string to_hf_name(std::string_view name);

}  // namespace flatshard::models
