#pragma once

#include "flatshard/models/config.h"
#include "flatshard/models/families/hf_reader.h"

namespace flatshard::models {

/// Reads the RoPE settings of a config.json into `config`, after max_seq_len
/// and rope_theta are set. They are in rope_scaling, or in rope_parameters as
/// transformers 5 writes it. rope_parameters has rope_theta next to the type.
/// For models with windows it has one object for blocks with a window and one
/// for the others.
/// @throws Error{config} for an unknown type.
void read_rope(const HfReader& reader, ModelConfig& config);

/// Writes rope_theta, rope_scaling and max_position_embeddings, so that
/// transformers 4 and 5 can read them.
void write_rope(const ModelConfig& config, nlohmann::ordered_json& json);

}  // namespace flatshard::models
