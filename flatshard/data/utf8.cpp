#include "flatshard/data/utf8.h"

#include <fmt/format.h>

#include <algorithm>

namespace flatshard::data {
namespace {

/// Returns the number of bytes of the character at `at`; 0 when it is none.
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

}  // namespace

std::string printable(std::string_view text, bool keep_lines) {
  std::string out;
  std::size_t nbytes = 0;
  for (std::size_t at = 0; at < text.size();
       at += std::max(nbytes, std::size_t{1})) {
    nbytes = character_bytes(text, at);
    const char c = text[at];
    const auto code = static_cast<unsigned char>(c);
    if (nbytes == 0) {
      out += "\uFFFD";
    } else if (keep_lines && (c == '\n' || c == '\t')) {
      out += c;
    } else if (c == '\n' || c == '\r' || c == '\t') {
      out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    } else if (code < ' ' || c == '\x7f') {
      out += fmt::format("\\x{:02x}", code);
    } else {
      out += text.substr(at, nbytes);
    }
  }
  return out;
}

}  // namespace flatshard::data
