#pragma once

#include "flatshard/models/config.h"
#include "flatshard/plan/shape.h"
#include "flatshard/train/config/run_config.h"
#include "flatshard/train/plan/planned_model.h"

#include <cstdint>
#include <vector>

namespace flatshard {

/// Returns the units of a model with the shapes of their groups, as
/// make_train_state would make them.
///
/// @param config  resolved.
/// @param microbatches  of a step: with one, gradients are not accumulated.
/// @throws Error{config} for what the trainer refuses too.
std::vector<plan::UnitShape> planned_units(
    const Config& config,
    const models::ModelConfig& model,
    std::int64_t microbatches,
    PlannedModel& modules);

}  // namespace flatshard
