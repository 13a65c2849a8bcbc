#pragma once

#include <string>
#include <vector>

#include "flatshard/data/loader.h"
#include "flatshard/train/config/run_config.h"
#include "flatshard/train/metrics/metrics.h"

namespace flatshard {

/// Returns one for each dataset of data.train. Random tokens have no epochs.
/// @param config  resolved.
std::vector<DataEpochs> data_epochs(
    const Config& config,
    const data::Loader& loader);

/// Returns a line for people.
std::string to_string(const DataEpochs& data);

}  // namespace flatshard
