#pragma once

#include "flatshard/models/config.h"
#include "flatshard/plan/job.h"
#include "flatshard/train/config.h"

#include <cstdint>

namespace flatshard {

/// What a rank computes and keeps for one microbatch, of each kind of layer: as
/// the layers of flatshard/models run on CUDA. Sizes of activations are those
/// that autograd saves.
///
/// @param config  resolved.
/// @param float8  which of a layer's products are in FP8; empty: none.
/// Layers: kinds 0 (without experts) and 1 (with experts).
void add_model_work(
    const Config& config,
    const models::ModelConfig& model,
    const std::string& float8,
    plan::Job& job);

}  // namespace flatshard
