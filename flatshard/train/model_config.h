#pragma once

#include "flatshard/models/config.h"
#include "flatshard/models/moe.h"
#include "flatshard/train/config.h"

namespace flatshard {

/// The model that [model] describes: preset or hf_config first, then every key
/// that is set. @throws Error{config} naming the key.
models::ModelConfig model_config(const Config& config);

/// What [moe] says of the training of its experts.
models::MoeOptions moe_options(const Config& config);

}  // namespace flatshard
