#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace flatshard::data {

/// The character that stands for what is none.
inline constexpr std::uint32_t kReplacement = 0xFFFD;

inline constexpr std::size_t kAllUtf8 = std::string_view::npos;

/// Returns the first byte at which `text` is not UTF-8 (RFC 3629), or kAllUtf8.
std::size_t find_invalid_utf8(std::string_view text);

/// Replaces each byte that belongs to no character by U+FFFD.
/// @return how many.
std::int64_t replace_invalid_utf8(std::string& text);

/// Appends a character. Half of a surrogate pair becomes U+FFFD.
void append_utf8(std::string& text, std::uint32_t code);

/// Returns a text for a terminal: control characters are written as escapes,
/// and what is not UTF-8 becomes U+FFFD.
/// @param keep_lines  line ends and tabs stay as they are.
std::string printable(std::string text, bool keep_lines);

}  // namespace flatshard::data
