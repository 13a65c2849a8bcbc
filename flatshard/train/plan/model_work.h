#pragma once

#include "flatshard/models/config.h"
#include "flatshard/plan/job.h"
#include "flatshard/train/config.h"

#include <functional>
#include <string>
#include <string_view>

namespace flatshard {

/// The properties of a layer's weight, such as "self_attn.q_proj.weight" of
/// layer 3.
struct LayerWeights {
  /// Its FP8 recipe; empty: it is in bfloat16.
  std::function<std::string(std::int64_t layer, std::string_view weight)>
      float8;
  /// Whether its linear layer has an adapter.
  std::function<bool(std::int64_t layer, std::string_view weight)> adapted;
};

/// Adds a rank's work and memory for one microbatch, of each kind of layer: as
/// the layers of flatshard/models run on CUDA. Sizes of activations are the
/// sizes that autograd saves.
///
/// Layers whose weights are in FP8 and have adapters alike are of one kind. A
/// run with adapters freezes the other weights, and the first layer of each
/// such kind, whose input has no gradient, is another kind.
/// @param config  resolved.
void add_model_work(
    const Config& config,
    const models::ModelConfig& model,
    const LayerWeights& weights,
    plan::Job& job);

}  // namespace flatshard
