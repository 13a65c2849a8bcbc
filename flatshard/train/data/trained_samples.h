#pragma once

#include <vector>

#include "flatshard/data/loader.h"
#include "flatshard/train/data/validation_set.h"

namespace flatshard {

/// Logs a warning with the number of samples without a trained token (filled by
/// prompts) for each dataset of data.train. Reads the masks of data.train, and
/// of validation sets up to the first trained token.
/// @throws Error{config} naming the dataset if no sample has a trained token.
void check_trained_samples(
    const std::vector<data::SourceChoice>& train,
    const data::Loader& loader,
    const std::vector<ValidationSet>& validation_sets);

}  // namespace flatshard
