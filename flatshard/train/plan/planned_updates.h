#pragma once

#include "flatshard/core/stored_entry.h"
#include "flatshard/fully_shard/describe.h"
#include "flatshard/plan/job.h"
#include "flatshard/train/config/optimizer_keys.h"

#include <cstdint>
#include <vector>

namespace flatshard {

/// The optimizer's states and work, of a job.
struct PlannedUpdates {
  std::int64_t state_nbytes = 0;  ///< on the GPU, of the rank with the most
  std::int64_t host_state_nbytes = 0;       ///< likewise, in host memory
  std::vector<std::int64_t> copied_states;  ///< of offloaded ones, by UnitId
  std::vector<plan::Kernels> units;         ///< passes over memory, by UnitId
  std::vector<plan::MatrixWork> matrices;
};

/// Plans the optimizer that make_optimizer would create for these units.
/// @param plans  of the units.
/// @throws Error{config} as it does.
PlannedUpdates planned_updates(
    const config::Optimizer& keys,
    const StoredEntriesOf& entries_of,
    const std::vector<UnitDescription>& units,
    const std::vector<UnitPlan>& plans);

}  // namespace flatshard
