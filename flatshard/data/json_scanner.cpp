#include "flatshard/data/json_scanner.h"

#include <fmt/format.h>

#include <algorithm>

#include "flatshard/data/utf8.h"

namespace flatshard::data {

void JsonScanner::fail(std::string what, bool incomplete) const {
  throw Problem{std::move(what), std::min(at_, json_.size()), incomplete};
}

char JsonScanner::peek() {
  at_ = std::min(json_.find_first_not_of(" \t\r\n", at_), json_.size());
  return at_ < json_.size() ? json_[at_] : '\0';
}

bool JsonScanner::take(char c) {
  if (peek() != c || at_ == json_.size()) {
    return false;
  }
  ++at_;
  return true;
}

char JsonScanner::next() {
  if (at_ >= json_.size()) {
    fail("ends within a text", true);
  }
  return json_[at_++];
}

unsigned JsonScanner::hex4() {
  unsigned code = 0;
  for (int i = 0; i < 4; ++i) {
    const char c = next();
    const unsigned digit = c >= '0' && c <= '9'   ? c - '0'
                           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                  : 16;
    if (digit == 16) {
      fail("has a \\u that four hexadecimal digits do not follow");
    }
    code = 16 * code + digit;
  }
  return code;
}

void JsonScanner::escape(std::string& out) {
  const char c = next();
  constexpr std::string_view kNames = "\"\\/bfnrt";
  constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
  const std::size_t found = kNames.find(c);
  if (found != std::string_view::npos) {
    out.push_back(kMeanings[found]);
    return;
  }
  if (c != 'u') {
    fail(fmt::format("has the escape '\\{}', which JSON does not have", c));
  }
  std::uint32_t code = hex4();
  if (code >= 0xD800 && code < 0xDC00 && json_.substr(at_).starts_with("\\u")) {
    const std::size_t second = at_;
    at_ += 2;
    const std::uint32_t low = hex4();
    if (low >= 0xDC00 && low < 0xE000) {
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    } else {
      at_ = second;
    }
  }
  append_utf8(out, code);
}

void JsonScanner::string(std::string* out) {
  ++at_;  // the quote
  for (;;) {
    const std::size_t end =
        std::min(json_.find_first_of("\"\\", at_), json_.size());
    if (out != nullptr) {
      out->append(json_, at_, end - at_);
    }
    at_ = end;
    if (next() == '"') {
      return;
    }
    if (out != nullptr) {
      escape(*out);
    } else {
      next();
    }
  }
}

void JsonScanner::skip_value() {
  std::string open;  // the brackets that are to be closed
  do {
    const char c = peek();
    if (at_ == json_.size()) {
      fail("ends within an object", true);
    }
    if (c == '"') {
      string(nullptr);
    } else if (c == '{' || c == '[') {
      open.push_back(c == '{' ? '}' : ']');
      ++at_;
    } else if (!open.empty() && (c == ',' || c == ':')) {
      ++at_;
    } else if (!open.empty() && c == open.back()) {
      open.pop_back();
      ++at_;
    } else {
      const std::size_t end =
          std::min(json_.find_first_of(" \t\r\n,:]}[{\"", at_), json_.size());
      if (end == at_) {
        fail(fmt::format("expected a value, got '{}'", c));
      }
      at_ = end;
    }
  } while (!open.empty());
}

std::string JsonScanner::describe_next() {
  switch (peek()) {
    case '{':
      return "an object";
    case '[':
      return "a list";
    case '"':
      return "text";
    case 'n':
      return "null";
    case 't':
    case 'f':
      return "true or false";
    case '\0':
      return "nothing";
    case '-':
    case 'N':
    case 'I':
      return "a number";
    default:
      return json_[at_] >= '0' && json_[at_] <= '9'
                 ? "a number"
                 : fmt::format("'{}'", json_.substr(at_, 20));
  }
}

JsonScanner::Field JsonScanner::object(
    std::string_view field,
    std::string& text) {
  text.clear();
  Field found;
  const std::string got = describe_next();
  if (!take('{')) {
    fail("expected an object, got " + got);
  }
  while (!take('}')) {
    if (peek() != '"') {
      const bool at_end = at_ == json_.size();
      fail(
          at_end ? "ends within an object"
                 : "expected a name in double quotes, got " + describe_next(),
          at_end);
    }
    std::string& name = found.names.emplace_back();
    string(&name);
    if (!take(':')) {
      fail(fmt::format("expected ':' after \"{}\"", name), at_ == json_.size());
    }
    const char c = peek();
    if (c == '[') {
      found.lists.push_back(name);
    }
    if (name != field) {
      skip_value();
    } else {
      if (found.kind != Field::Kind::missing) {
        fail(fmt::format("has the field '{}' twice", name));
      }
      if (c == '"') {
        found.kind = Field::Kind::text;
        string(&text);
      } else {
        found.kind = c == 'n' ? Field::Kind::null : Field::Kind::other;
        found.other = describe_next();
        skip_value();
      }
    }
    if (!take(',') && peek() != '}') {
      const bool at_end = at_ == json_.size();
      fail(
          at_end ? "ends within an object"
                 : fmt::format(
                       "expected ',' or '}}' after \"{}\", got {}",
                       name,
                       describe_next()),
          at_end);
    }
  }
  return found;
}

}  // namespace flatshard::data
