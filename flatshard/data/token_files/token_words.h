#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace flatshard::data {

/// A type of integers in which programs store tokens, little-endian.
struct WordType {
  std::string_view name;  ///< NumPy's: "uint16", ...
  std::int64_t nbytes = 0;
  /// Reads words as int64. A uint64 above its range becomes negative.
  void (*widen)(std::span<const std::byte> words, std::span<std::int64_t> out) =
      nullptr;
};

/// Returns the type of that name; null for other names.
const WordType* find_word_type(std::string_view name);

/// Returns the least width in bytes that the words of a file seem to have: 4 or
/// 8 where the upper halves are those of small tokens, else 2.
/// @param head  its first bytes.
std::int64_t likely_word_nbytes(std::span<const std::uint16_t> head);

}  // namespace flatshard::data
