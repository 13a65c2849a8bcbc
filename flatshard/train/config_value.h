#pragma once

#include <string>
#include <string_view>

#include "flatshard/train/config.h"

namespace flatshard {

/// Checks a value against its key's choices or range.
/// @param where  the place in a file, or the option, for the message.
/// @throws Error{config}.
void check_config_value(
    const ConfigKey& key,
    const ConfigField& field,
    const std::string& where);

/// What the user wrote, in a length that a message can bear.
std::string shortened(std::string_view text);

}  // namespace flatshard
