#pragma once

#include "flatshard/models/families/family.h"

namespace flatshard::models {

// The common properties of the generations of Gemma.

/// Blocks with norms before and after their parts, by 1 + weight; GeGLU; scaled
/// embeddings, tied to the head.
ModelConfig gemma_defaults(std::string_view family);

/// Returns which names files have of these norms.
FamilyNames gemma_names();

/// Reads biases, windows, query_pre_attn_scalar and the cap of logits.
/// @param pattern  every N-th block has no window, with N = pattern.
void read_gemma(
    const HfReader& reader,
    std::int64_t pattern,
    ModelConfig& config);
void write_gemma(const ModelConfig& config, nlohmann::ordered_json& json);

}  // namespace flatshard::models
