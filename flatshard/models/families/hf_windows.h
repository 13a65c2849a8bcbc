#pragma once

#include "flatshard/models/config.h"
#include "flatshard/models/families/hf_reader.h"

#include <cstdint>
#include <functional>

namespace flatshard::models {

/// Sets which blocks have the window, for models with one: layer_types of a
/// config.json, or `otherwise` if the key is missing. A model has no window if
/// none of its blocks has one.
void read_windows(
    const HfReader& reader,
    ModelConfig& config,
    const std::function<bool(std::int64_t layer)>& otherwise);

/// Writes layer_types.
void write_layer_types(const ModelConfig& config, nlohmann::ordered_json& json);

/// Reads the windows of Qwen models: use_sliding_window, sliding_window and
/// max_window_layers (the number of first blocks without a window).
void read_qwen_windows(const HfReader& reader, ModelConfig& config);
void write_qwen_windows(
    const ModelConfig& config,
    nlohmann::ordered_json& json);

}  // namespace flatshard::models
