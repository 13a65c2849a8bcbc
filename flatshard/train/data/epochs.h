#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flatshard/data/loader.h"
#include "flatshard/train/metrics/metrics.h"

namespace flatshard {

/// Returns one for each dataset that is trained on. Random tokens have no
/// epochs.
/// @param train  the datasets of the loader.
/// @param steps  of the run.
std::vector<DataEpochs> data_epochs(
    const std::vector<data::SourceChoice>& train,
    const data::Loader& loader,
    std::int64_t steps);

/// Returns a line for people.
std::string to_string(const DataEpochs& data);

}  // namespace flatshard
