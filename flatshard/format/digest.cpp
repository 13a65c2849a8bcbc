#include "flatshard/format/digest.h"

#include "flatshard/core/error.h"

// Header-only: nothing to link, and the compiler sees the loops.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace flatshard {
namespace {

constexpr std::size_t kDigits = 16;

int hex_value(char c) {
  if (c >= '0' && c <= '9') {
    return c - '0';
  }
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

}  // namespace

std::uint64_t digest(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::uint64_t num_digest_blocks(std::uint64_t nbytes) {
  return nbytes / kDigestBlock + (nbytes % kDigestBlock != 0 ? 1 : 0);
}

std::string digests_to_hex(std::span<const std::uint64_t> digests) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string text;
  text.reserve(digests.size() * kDigits);
  for (const std::uint64_t value : digests) {
    for (int shift = 60; shift >= 0; shift -= 4) {
      text += kHex[(value >> shift) & 0xf];
    }
  }
  return text;
}

std::vector<std::uint64_t> digests_from_hex(std::string_view text) {
  FLATSHARD_CHECK(
      text.size() % kDigits == 0,
      format,
      "expected digests of {} hexadecimal digits each, got {} digits",
      kDigits,
      text.size());
  std::vector<std::uint64_t> digests;
  digests.reserve(text.size() / kDigits);
  for (std::size_t begin = 0; begin < text.size(); begin += kDigits) {
    std::uint64_t value = 0;
    for (const char c : text.substr(begin, kDigits)) {
      const int digit = hex_value(c);
      FLATSHARD_CHECK(
          digit >= 0,
          format,
          "expected digests in hexadecimal digits 0-9 and a-f, got '{}'",
          c);
      value = value << 4 | static_cast<std::uint64_t>(digit);
    }
    digests.push_back(value);
  }
  return digests;
}

}  // namespace flatshard
