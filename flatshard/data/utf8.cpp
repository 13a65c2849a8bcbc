#include "flatshard/data/utf8.h"

#include <fmt/format.h>

#include <cstring>

namespace flatshard::data {
namespace {

/// Returns the bytes of the character at `at`; 0 when it is none.
std::size_t character_bytes(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) {
    return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0U;
  };
  const auto follows = [&](std::size_t i) { return (byte(i) & 0xC0U) == 0x80; };
  const unsigned first = byte(0);
  if (first < 0x80) {
    return 1;
  }
  if (first >= 0xC2 && first <= 0xDF) {
    return follows(1) ? 2 : 0;
  }
  if (first >= 0xE0 && first <= 0xEF) {
    const unsigned low = first == 0xE0 ? 0xA0 : 0x80;
    const unsigned high = first == 0xED ? 0x9F : 0xBF;  // no surrogates
    return byte(1) >= low && byte(1) <= high && follows(2) ? 3 : 0;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    const unsigned low = first == 0xF0 ? 0x90 : 0x80;
    const unsigned high = first == 0xF4 ? 0x8F : 0xBF;
    return byte(1) >= low && byte(1) <= high && follows(2) && follows(3) ? 4
                                                                         : 0;
  }
  return 0;
}

std::size_t find_invalid(std::string_view text, std::size_t at) {
  constexpr std::uint64_t kHighBits = 0x8080808080808080ULL;
  while (at < text.size()) {
    std::uint64_t word = 0;
    if (at + sizeof(word) <= text.size()) {
      std::memcpy(&word, text.data() + at, sizeof(word));
      if ((word & kHighBits) == 0) {
        at += sizeof(word);
        continue;
      }
    }
    const std::size_t nbytes = character_bytes(text, at);
    if (nbytes == 0) {
      return at;
    }
    at += nbytes;
  }
  return kAllUtf8;
}

}  // namespace

std::size_t find_invalid_utf8(std::string_view text) {
  return find_invalid(text, 0);
}

std::int64_t replace_invalid_utf8(std::string& text) {
  std::size_t bad = find_invalid(text, 0);
  if (bad == kAllUtf8) {
    return 0;
  }
  std::string mended;
  std::int64_t count = 0;
  std::size_t from = 0;
  for (; bad != kAllUtf8; bad = find_invalid(text, from)) {
    mended.append(text, from, bad - from);
    append_utf8(mended, kReplacement);
    ++count;
    from = bad + 1;
  }
  mended.append(text, from);
  text = std::move(mended);
  return count;
}

void append_utf8(std::string& text, std::uint32_t code) {
  constexpr std::uint32_t kLast = 0x10FFFF;
  if ((code >= 0xD800 && code <= 0xDFFF) || code > kLast) {
    code = kReplacement;
  }
  const auto tail = [&](unsigned shift) {
    text.push_back(static_cast<char>(0x80 | ((code >> shift) & 0x3F)));
  };
  if (code < 0x80) {
    text.push_back(static_cast<char>(code));
  } else if (code < 0x800) {
    text.push_back(static_cast<char>(0xC0 | (code >> 6)));
    tail(0);
  } else if (code < 0x10000) {
    text.push_back(static_cast<char>(0xE0 | (code >> 12)));
    tail(6);
    tail(0);
  } else {
    text.push_back(static_cast<char>(0xF0 | (code >> 18)));
    tail(12);
    tail(6);
    tail(0);
  }
}

std::string printable(std::string text, bool keep_lines) {
  replace_invalid_utf8(text);
  std::string out;
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (keep_lines && (c == '\n' || c == '\t')) {
      out += c;
    } else if (c == '\n' || c == '\r' || c == '\t') {
      out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    } else if (code < ' ' || c == '\x7f') {
      out += fmt::format("\\x{:02x}", code);
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace flatshard::data
