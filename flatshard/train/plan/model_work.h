#pragma once

#include "flatshard/models/config.h"
#include "flatshard/plan/job.h"
#include "flatshard/train/config.h"

#include <map>
#include <set>
#include <string>

namespace flatshard {

/// What a rank computes and keeps for one microbatch, of each kind of layer: as
/// the layers of flatshard/models run on CUDA. Sizes of activations are those
/// that autograd saves.
///
/// Layers whose weights are in FP8 and have adapters alike are of one kind.
/// With adapters the other weights are frozen, and of those kinds the first
/// layer, whose input has no gradient, is another one.
///
/// @param config   resolved.
/// @param float8   the recipes of the weights in FP8, by their names.
/// @param adapted  the names of the weights whose linear layers have adapters.
void add_model_work(
    const Config& config,
    const models::ModelConfig& model,
    const std::map<std::string, std::string>& float8,
    const std::set<std::string>& adapted,
    plan::Job& job);

}  // namespace flatshard
