#pragma once

#include "flatshard/models/config.h"
#include "flatshard/schedule/overlap_events.h"
#include "flatshard/shape/unit_plan.h"
#include "flatshard/train/config/run_config.h"
#include "flatshard/train/plan/planned_model.h"

#include <cstdint>
#include <vector>

namespace flatshard {

/// The units of a model before they have memory.
struct PlannedUnits {
  std::vector<UnitShape> shapes;  ///< by UnitId
  PlanUnits by_node;
};

/// Describes the units that make_train_state would allocate.
///
/// @param config  resolved.
/// @param microbatches  of a step: with one, gradients are not accumulated.
/// @throws Error{config} as the trainer does.
PlannedUnits planned_units(
    const Config& config,
    const models::ModelConfig& model,
    std::int64_t microbatches,
    PlannedModel& modules);

}  // namespace flatshard
