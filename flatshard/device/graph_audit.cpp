#include "flatshard/device/graph_audit.h"

#include <c10/util/Type.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>

namespace flatshard {

void GraphMemory::add_managed(std::uint64_t begin, std::uint64_t nbytes) {
  managed_[begin] = std::max(managed_[begin], begin + nbytes);
}

void GraphMemory::allow(std::uint64_t begin, std::uint64_t nbytes) {
  allowed_[begin] = std::max(allowed_[begin], begin + nbytes);
}

bool GraphMemory::holds(
    const Ranges& ranges,
    std::uint64_t word,
    bool end_too) {
  // Ranges of tensors overlap, so those that start earlier count as well.
  for (auto next = ranges.upper_bound(word); next != ranges.begin();) {
    --next;
    if (word < next->second || (end_too && word == next->second)) {
      return true;
    }
  }
  return false;
}

GraphMemory::Kind GraphMemory::kind(std::uint64_t word) const {
  if (holds(allowed_, word, /*end_too=*/true)) {
    return Kind::allowed;
  }
  return holds(managed_, word, /*end_too=*/false) ? Kind::stray
                                                  : Kind::no_address;
}

std::vector<std::uint64_t> words_of(const void* data, std::size_t nbytes) {
  std::vector<std::uint64_t> words(nbytes / sizeof(std::uint64_t));
  std::memcpy(words.data(), data, words.size() * sizeof(std::uint64_t));
  return words;
}

std::string
describe_stray(const std::string& name, std::size_t index, std::uint64_t word) {
  // Names of templates can have thousands of characters.
  constexpr std::size_t kLongest = 160;
  std::string shown = c10::demangle(name.c_str());
  if (shown.size() > kLongest) {
    shown = shown.substr(0, kLongest) + "...";
  }
  return fmt::format("{}, word {}: {:#x}", shown, index, word);
}

}  // namespace flatshard
