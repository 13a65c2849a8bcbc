#pragma once

#include "flatshard/models/config.h"
#include "flatshard/plan/job.h"
#include "flatshard/train/config.h"

#include <functional>
#include <string>
#include <string_view>

namespace flatshard {

/// The FP8 recipe of a layer's weight, such as "self_attn.q_proj.weight" of
/// layer 3; empty: it is in bfloat16.
using Float8RecipeOf =
    std::function<std::string(std::int64_t layer, std::string_view weight)>;

/// What a rank computes and keeps for one microbatch, of each kind of layer: as
/// the layers of flatshard/models run on CUDA. Sizes of activations are those
/// that autograd saves.
///
/// @param config  resolved.
/// Layers whose weights are in FP8 alike are of one kind.
void add_model_work(
    const Config& config,
    const models::ModelConfig& model,
    const Float8RecipeOf& float8,
    plan::Job& job);

}  // namespace flatshard
