#pragma once

#include "flatshard/models/config.h"
#include "flatshard/plan/job.h"
#include "flatshard/train/config/run_config.h"
#include "flatshard/train/plan/planned_model.h"

#include <cstdint>
#include <memory>

namespace flatshard {

/// The GPUs of a host.
struct PlannedHost {
  std::int64_t ranks = 8;
  /// They copy from and to each other's memory. Without it auto does not.
  bool nvlink = true;
};

/// Returns a run as the planner sees it: the units, groups and layouts that
/// make_train_state would make, and the work of its model.
///
/// @param config   resolved for `ranks`.
/// @param modules  of an equal model; null: they are made.
/// @throws Error{config} as the trainer does, and for copies between
///   hosts.
plan::Job plan_job(
    const Config& config,
    const models::ModelConfig& model,
    std::int64_t ranks,
    const PlannedHost& host,
    std::shared_ptr<PlannedModel> modules = nullptr);

/// Returns the bytes of activations that a rank stores in host memory from
/// forward to backward, by the shapes of the model's layers.
/// @param config  resolved.
std::int64_t offloaded_nbytes(
    const Config& config,
    const models::ModelConfig& model);

}  // namespace flatshard
