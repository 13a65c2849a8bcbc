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

/// Whether the value of a text key is a path.
bool holds_path(const ConfigKey& key);

/// What people type on a command line as TOML has it: `.001`, `5.`, `1.e4`,
/// `007` and `True`. Anything else is returned unchanged.
std::string typed_value(const std::string& value, const ConfigField& field);

/// What the user wrote, in a length that a message can bear.
std::string shortened(std::string_view text);

}  // namespace flatshard
