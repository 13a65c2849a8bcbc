#pragma once

#include "flatshard/train/plan/run_plan.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

/// A choice of strategy, degrees, recompute, batch, FP8 and optimizer states
/// for a config.
struct RunChoice {
  std::string strategy = "zero3";
  std::int64_t tensor_degree = 1;
  std::int64_t replicas = 1;
  bool reshard_after_forward = true;
  models::ActivationCheckpoint recompute = models::ActivationCheckpoint::none;
  std::optional<std::int64_t> recomputed_layers = {};  ///< unset: all
  std::int64_t local_batch_size = 1;
  std::int64_t expert_degree = 1;
  std::int64_t expert_tensor_degree = 1;
  bool overlap = false;  ///< two microbatches at once, late weight gradients
  config::Float8Recipe float8;
  StateFormat state_dtype = StateFormat::float32;

  bool operator==(const RunChoice&) const = default;
};

/// A choice and its estimate.
struct PlannedChoice {
  RunChoice choice;
  double tokens_per_step = 0;
  plan::Estimate estimate;  ///< without its operations
};

/// All choices that were tried.
struct Sweep {
  std::vector<PlannedChoice> fitting;    ///< the fastest first
  std::vector<PlannedChoice> too_large;  ///< the smallest first
  /// How many choices the trainer refuses, by its error.
  std::map<std::string, std::int64_t> refusals;

  std::int64_t num_refused() const;
};

/// Plans `config` in all ways that make sense on these machines. They vary
/// strategies, replicas of shards (HSDP), degrees of tensor parallelism inside
/// a host, recompute and sequences of a microbatch. They also vary degrees of
/// experts and of their width with and without overlap, and FP8 for the
/// fastest. AdamW's states become smaller where the config's do not fit, and
/// for the fastest. Other keys of the config stay. A set
/// training.global_batch_size stays too, and ways that do not divide it are
/// left out.
/// @throws Error{config} where the config is wrong for these ranks as it is.
Sweep sweep(const Config& config, const PlannedMachines& machines);

/// Returns two tables, and the trainer's errors.
std::string to_string(const Sweep& sweep, const PlannedMachines& machines);
std::string to_json(const Sweep& sweep, const PlannedMachines& machines);

}  // namespace flatshard
