#pragma once

#include "flatshard/models/config.h"
#include "flatshard/models/moe.h"
#include "flatshard/train/config/run_config.h"

namespace flatshard {

/// Returns the model that [model] describes: preset or hf_config first, then
/// every key that is set. @throws Error{config} naming the key.
models::ModelConfig model_config(const Config& config);

/// Returns the options of [moe] for the training of experts.
models::MoeOptions moe_options(const config::Moe& keys, bool force_balance);

}  // namespace flatshard
