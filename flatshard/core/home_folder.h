#pragma once

#include <string>
#include <string_view>

namespace flatshard {

/// Replaces a `~` or `~name` at the start of a path with that home folder, as a
/// shell does for an unquoted word. Any other text is returned unchanged, as is
/// `~name` of a user who does not exist.
std::string expand_home(std::string_view path);

}  // namespace flatshard
