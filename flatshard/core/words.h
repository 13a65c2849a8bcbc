#pragma once

#include <fmt/ranges.h>

#include <optional>
#include <string_view>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/core/nearest_name.h"

// Tables of the words that values have in configs, options and messages.
namespace flatshard {

template <class T>
struct Word {
  std::string_view word;
  T value;
};

/// Returns the word of `value`, or "unknown" without one.
template <class Table, class T>
constexpr std::string_view word_of(const Table& table, const T& value) {
  for (const auto& row : table) {
    if (row.value == value) {
      return row.word;
    }
  }
  return "unknown";
}

template <class Table>
std::vector<std::string_view> words_of(const Table& table) {
  std::vector<std::string_view> words;
  for (const auto& row : table) {
    words.push_back(row.word);
  }
  return words;
}

/// Sets `value` to what `word` means. @return false without such a word.
template <class Table, class T>
bool read_word(const Table& table, std::string_view word, T& value) {
  for (const auto& row : table) {
    if (row.word == word) {
      value = row.value;
      return true;
    }
  }
  return false;
}

/// @param what  for the message.
/// @throws Error{config} with all words and the nearest one.
template <class Table>
auto value_of(
    std::string_view what,
    const Table& table,
    std::string_view word) {
  auto value = std::begin(table)->value;
  const auto words = words_of(table);
  const std::string near = near_name(word, words);
  FLATSHARD_CHECK(
      read_word(table, word, value),
      config,
      "{}: expected one of {}, got '{}'{}",
      what,
      fmt::join(words, ", "),
      word,
      near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
  return value;
}

}  // namespace flatshard
