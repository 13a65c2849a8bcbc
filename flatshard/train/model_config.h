#pragma once

#include "flatshard/models/config.h"
#include "flatshard/train/config.h"

namespace flatshard {

/// The model that [model] describes: preset or hf_config first, then every key
/// that is set. @throws Error{config} naming the key.
models::ModelConfig model_config(const Config& config);

}  // namespace flatshard
