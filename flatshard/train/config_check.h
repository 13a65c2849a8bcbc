#pragma once

#include "flatshard/train/config.h"

namespace flatshard {

/// Every value against its key's choices and range.
/// @throws Error{config}.
void check_config_values(const Config& config);

/// Whether a key has another value than in `Config{}`.
bool differs_from_default(const Config& config, const ConfigKey& key);

}  // namespace flatshard
