#pragma once

#include "flatshard/models/config.h"
#include "flatshard/plan/job.h"
#include "flatshard/train/plan/layer_kernels.h"

#include <map>
#include <set>
#include <string>

namespace flatshard {

/// Adds a rank's work and memory for one microbatch, of each kind of layer: as
/// the layers of flatshard/models run on CUDA. Sizes of activations are the
/// sizes that autograd saves.
///
/// Layers with the same FP8 weights and the same adapters are of one kind. A
/// run with adapters freezes the other weights. The input of the first layer of
/// each such kind has no gradient, so that layer is another kind. Reads
/// Job::copy_activations.
/// @param float8   the recipes of the weights in FP8, by their names.
/// @param adapted  the names of the weights whose linear layers have adapters.
void add_model_work(
    const WorkOptions& options,
    const models::ModelConfig& model,
    const std::map<std::string, std::string>& float8,
    const std::set<std::string>& adapted,
    plan::Job& job);

}  // namespace flatshard
