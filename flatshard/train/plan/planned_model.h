#pragma once

#include "flatshard/models/config.h"
#include "flatshard/models/llama.h"
#include "flatshard/plan/shape.h"
#include "flatshard/schedule/overlap_events.h"
#include "flatshard/train/config/run_config.h"

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace flatshard {

/// A parameter of the model, by its main name.
struct OwnedParameter {
  std::string name;
  std::vector<std::int64_t> shape;
  UnitId unit = 0;
  bool reads_planes = true;
  bool trainable = true;
};

/// The modules and parameters of a model as a rank has them. Plans can share
/// one whose configs differ neither in the model nor in the degrees of tensor
/// and expert parallelism: making it takes most of the time of a plan.
struct PlannedModel {
  /// @param config  resolved.
  PlannedModel(const Config& config, const models::ModelConfig& shape);

  models::Llama model{nullptr};
  std::vector<plan::UnitShape> units;  ///< without groups
  std::vector<OwnedParameter> parameters;
  PlanUnits plan_units;
  std::set<std::string> adapted;  ///< weights of layers with an adapter
};

}  // namespace flatshard
