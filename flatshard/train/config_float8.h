#pragma once

#include "flatshard/train/config.h"

namespace flatshard {

/// What [float8] does not go with.
/// @throws Error{config} naming both options.
void check_float8(const Config& config);

}  // namespace flatshard
