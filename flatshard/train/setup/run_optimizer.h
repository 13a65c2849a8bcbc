#pragma once

#include "flatshard/core/stored_entry.h"
#include "flatshard/optim/lr_schedule.h"
#include "flatshard/optim/optimizer.h"
#include "flatshard/train/config/optimizer_keys.h"

#include <memory>
#include <vector>

namespace flatshard {

/// Returns the parameter groups that [optimizer] describes.
/// @param entries_of  Hugging Face's entries of a parameter.
ParameterRules parameter_rules(
    const config::Optimizer& keys,
    const StoredEntriesOf& entries_of);

/// Returns the optimizer that [optimizer] describes.
/// @param entries_of  Hugging Face's entries of a parameter.
/// @param streams  options of the streams of offloaded states.
/// @throws Error{config}: see parameter_groups.
std::unique_ptr<Optimizer> make_optimizer(
    const config::Optimizer& keys,
    const std::vector<ParamGroup*>& groups,
    const StoredEntriesOf& entries_of,
    const StreamOptions& streams);

/// Returns the learning rate of each step, by [lr_scheduler]. @throws
/// Error{config}.
LrSchedule lr_schedule(
    const config::LrScheduler& keys,
    double base_lr,
    std::int64_t total_steps);

}  // namespace flatshard
