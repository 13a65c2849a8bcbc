#include "flatshard/data/token_files/token_words.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace flatshard::data {
namespace {

template <class T>
void widen(std::span<const std::byte> words, std::span<std::int64_t> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    T word;
    std::memcpy(&word, words.data() + i * sizeof(T), sizeof(T));
    out[i] = static_cast<std::int64_t>(word);
  }
}

template <class T>
constexpr WordType word_type(std::string_view name) {
  return {.name = name, .nbytes = sizeof(T), .widen = widen<T>};
}

constexpr std::array kWordTypes{
    word_type<std::uint8_t>("uint8"),
    word_type<std::int8_t>("int8"),
    word_type<std::uint16_t>("uint16"),
    word_type<std::int16_t>("int16"),
    word_type<std::uint32_t>("uint32"),
    word_type<std::int32_t>("int32"),
    word_type<std::uint64_t>("uint64"),
    word_type<std::int64_t>("int64")};

}  // namespace

const WordType* find_word_type(std::string_view name) {
  const auto* found = std::ranges::find(kWordTypes, name, &WordType::name);
  return found == kWordTypes.end() ? nullptr : found;
}

std::int64_t likely_word_nbytes(std::span<const std::uint16_t> head) {
  constexpr std::size_t kFewest = 8;
  constexpr std::uint16_t kMostUpper = 3;  // tokens below 2^18
  bool is_4 = head.size() >= kFewest;
  bool is_8 = is_4;
  for (std::size_t i = 0; i < head.size(); ++i) {
    is_4 = is_4 && (i % 2 == 0 || head[i] <= kMostUpper);
    is_8 = is_8 && (i % 4 < 2 || head[i] == 0);
  }
  // Words of a few first tokens look like anything.
  const bool are_small = std::ranges::all_of(head, [](std::uint16_t word) {
    return word <= kMostUpper;
  });
  if (!is_4 || are_small) {
    return 2;
  }
  return is_8 ? 8 : 4;
}

}  // namespace flatshard::data
