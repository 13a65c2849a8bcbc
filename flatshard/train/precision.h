#pragma once

#include <c10/core/ScalarType.h>

#include <string>

#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/train/config.h"

namespace flatshard {

/// torch's name of a dtype, e.g. "bfloat16".
/// @param key  the option that has it, for the message.
/// @throws Error{config}.
at::ScalarType parse_dtype(const std::string& name, const std::string& key);

/// The dtypes of [precision]. @throws Error{config} naming the key.
Precision precision(const Config& config);

/// precision.scaling. @throws Error{config}.
GradScaling grad_scaling(const Config& config);

}  // namespace flatshard
