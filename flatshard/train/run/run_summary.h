#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "flatshard/data/loader.h"
#include "flatshard/models/config.h"
#include "flatshard/train/config/run_config.h"
#include "flatshard/train/run/advice.h"
#include "flatshard/train/setup/train_state.h"

namespace flatshard {

/// The data of a run's summary before its first step.
struct RunSummary {
  const Config& config;  ///< resolved
  std::string set_keys;  ///< differing_keys of the user's config
  const models::ModelConfig& model;
  const Mesh& mesh;
  const TrainState& state;
  bool goes_on = false;  ///< with an earlier run's files
  const data::Loader& loader;
  std::int64_t num_microbatches = 1;
  double flops_per_token = 0;
  std::int64_t staging_nbytes = 0;  ///< in which checkpoints wait; 0: none
  AdviceOptions advice;
};

/// Returns the config's changes, the model, its distribution, and the memory
/// table, without a line end after the last line. A restart of the same run
/// adds little. Reads the config.toml of the run that it continues.
std::string to_string(const RunSummary& summary);

}  // namespace flatshard
