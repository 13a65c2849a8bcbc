#pragma once

#include "flatshard/models/config.h"
#include "flatshard/models/families/hf_reader.h"

namespace flatshard::models {

/// Reads how a config.json rotates queries and keys into `config`, whose
/// max_seq_len and rope_theta are set already. Rotations are in rope_scaling,
/// or in rope_parameters, which transformers 5 writes: there rope_theta is next
/// to the type, and models with windows have one object for blocks with a
/// window and one for the others.
/// @throws Error{config} for an unknown type.
void read_rope(const HfReader& reader, ModelConfig& config);

/// Writes rope_theta, rope_scaling and max_position_embeddings, which
/// transformers 4 and 5 read.
void write_rope(const ModelConfig& config, nlohmann::ordered_json& json);

}  // namespace flatshard::models
