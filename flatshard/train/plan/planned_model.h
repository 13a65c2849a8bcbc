#pragma once

#include "flatshard/models/config.h"
#include "flatshard/models/llama.h"
#include "flatshard/train/config/lora_keys.h"
#include "flatshard/train/config/parallelism_keys.h"

#include <set>
#include <string>

namespace flatshard {

/// The modules of a model as a rank has them, on the meta device. Plans can
/// share one if their configs differ neither in the model nor in the degrees of
/// tensor and expert parallelism. Making it is most of the time of a plan.
struct PlannedModel {
  PlannedModel(
      const config::Parallelism& keys,
      const config::Lora& lora,
      const models::ModelConfig& shape);

  models::Llama model{nullptr};
  std::set<std::string> adapted;  ///< weights of layers with an adapter
};

}  // namespace flatshard
