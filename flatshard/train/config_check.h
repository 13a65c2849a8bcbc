#pragma once

#include <set>
#include <string>
#include <vector>

#include "flatshard/train/config.h"

namespace flatshard {

/// Every value against its key's choices and range.
/// @throws Error{config}.
void check_config_values(const Config& config);

/// What follows from --set for the rest of the config: keys that it leaves
/// without use go back to their defaults, a warm-up or a trace that fewer steps
/// have no room for becomes shorter or earlier.
/// @param overridden  full names of the keys that --set gave; they stay.
/// @return what was changed and why, a sentence each.
std::vector<std::string> settle_overrides(
    Config& config,
    const std::set<std::string>& overridden);

void set_to_default(Config& config, const ConfigKey& key);

/// Whether a key has another value than in `Config{}`.
bool differs_from_default(const Config& config, const ConfigKey& key);

}  // namespace flatshard
