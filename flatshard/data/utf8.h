#pragma once

#include <string>
#include <string_view>

namespace flatshard::data {

/// Returns a text for a terminal: control characters are written as escapes,
/// and each byte that belongs to no character of UTF-8 (RFC 3629) becomes
/// U+FFFD.
/// @param keep_lines  line ends and tabs stay as they are.
std::string printable(std::string_view text, bool keep_lines);

}  // namespace flatshard::data
