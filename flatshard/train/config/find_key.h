#pragma once

#include <string>
#include <string_view>

#include "flatshard/train/config/key.h"

// Looks up keys by name, and suggests corrections for unknown names.
namespace flatshard::config {

bool is_section(std::string_view section);

/// @param where  the place in a file, or the option, for the message.
/// @throws Error{config} naming the section that was probably meant.
void check_section(std::string_view section, const std::string& where);

/// @throws Error{config} naming the key that was probably meant: one that has
/// another trainer's name, else a similar name or another section.
const ConfigKey& find_key(
    std::string_view section,
    std::string_view name,
    const std::string& where);

/// Returns "; give ..." for a key without a section.
std::string hint_without_section(std::string_view name);

}  // namespace flatshard::config
