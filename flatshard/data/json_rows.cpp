#include "flatshard/data/json_rows.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "flatshard/core/error.h"
#include "flatshard/data/utf8.h"

namespace flatshard::data {

JsonRows::JsonRows(
    const std::filesystem::path& path,
    std::string text_field,
    bool whole_rows)
    : path_(path),
      text_field_(std::move(text_field)),
      whole_rows_(whole_rows),
      reader_(path) {
}

std::int64_t JsonRows::line_at(std::size_t at) const {
  const auto begin = json_.begin();
  return line_ +
         std::count(begin, begin + static_cast<std::ptrdiff_t>(at), '\n');
}

void JsonRows::fail(const std::string& what, std::size_t at) const {
  FLATSHARD_THROW(format, "{}:{}: {}", path_.string(), line_at(at), what);
}

void JsonRows::check_utf8(
    const std::string& text,
    const std::string& where,
    std::size_t at) const {
  const std::size_t bad = find_invalid_utf8(text);
  if (bad != kAllUtf8) {
    fail(
        fmt::format(
            "expected UTF-8 in the {}, got the byte 0x{:02x}; convert the "
            "file, for example with iconv -f latin1 -t utf-8",
            where,
            static_cast<unsigned char>(text[bad])),
        at);
  }
}

/// The next line that is not blank.
bool JsonRows::next_line() {
  while (reader_.read_line(json_)) {
    ++line_;
    if (json_.starts_with("\xef\xbb\xbf")) {
      json_.erase(0, 3);  // of files that were put together
    }
    if (json_.find_first_not_of(" \t\r") != std::string::npos) {
      return true;
    }
  }
  return false;
}

void JsonRows::find_form() {
  JsonScanner scanner(json_);
  if (scanner.peek() == '[') {
    form_ = Form::list;
  } else {
    form_ = Form::lines;
    try {
      if (scanner.peek() == '{') {
        scanner.skip_value();
      }
    } catch (const JsonScanner::Problem& problem) {
      // An object that continues in the next line.
      if (problem.incomplete) {
        form_ = Form::objects;
      }
    }
  }
  if (form_ != Form::lines) {
    json_ += '\n';
    json_ += reader_.read_all();
    JsonScanner list(json_);
    if (form_ == Form::list && list.take('[')) {
      at_ = list.at();
    }
  }
}

void JsonRows::read_object(JsonScanner& scanner, std::string& text) {
  scanner.peek();
  const std::size_t begin = scanner.at();
  row_line_ = line_at(begin);
  JsonScanner::Field field;
  try {
    field = scanner.object(text_field_, text);
  } catch (const JsonScanner::Problem& problem) {
    if (problem.incomplete) {
      fail("the object that begins here does not end", begin);
    }
    fail(
        problem.what + " (JSON rows are objects, one a line or in one list)",
        problem.at);
  }
  if (whole_rows_) {
    text = json_.substr(begin, scanner.at() - begin);
    check_utf8(text, "row", begin);
    return;
  }
  using Kind = JsonScanner::Field::Kind;
  if (field.kind == Kind::missing) {
    std::string hint;
    if (!field.lists.empty()) {
      hint = fmt::format(
          " (the documents may be the elements of '{0}': write them as lines "
          "with jq -c '.{0}[]')",
          field.lists.front());
    }
    for (const char* name : {"messages", "conversations"}) {
      if (std::ranges::find(field.names, name) != field.names.end()) {
        hint = " (rows of chats need --chat)";
      }
    }
    fail(
        fmt::format(
            "expected the text field '{}', found {}; name another with "
            "--text-field{}",
            text_field_,
            field.names.empty() ? "no field"
                                : fmt::to_string(fmt::join(field.names, ", ")),
            hint),
        begin);
  }
  if (field.kind == Kind::other) {
    fail(
        fmt::format(
            "expected text in the field '{}', got {}",
            text_field_,
            field.other),
        begin);
  }
  check_utf8(text, fmt::format("field '{}'", text_field_), begin);
}

bool JsonRows::next(std::string& text) {
  if (form_ == Form::unknown) {
    if (!next_line()) {
      return false;
    }
    find_form();
  } else if (form_ == Form::lines && !next_line()) {
    return false;
  }
  if (form_ != Form::lines) {
    return next_of_whole(text);
  }
  JsonScanner scanner(json_);
  read_object(scanner, text);
  if (scanner.peek() != '\0') {
    fail("more follows the object in its line", scanner.at());
  }
  return true;
}

bool JsonRows::next_of_whole(std::string& text) {
  JsonScanner scanner(json_, at_);
  if (form_ == Form::list) {
    if (scanner.take(']')) {
      if (scanner.peek() != '\0') {
        fail("more follows the list", scanner.at());
      }
      json_ = "]";  // the end again, without the rest of the file in memory
      at_ = 0;
      return false;
    }
    if (scanner.peek() == '\0') {
      fail("the list is cut off: it does not end with ']'", scanner.at());
    }
  } else if (scanner.peek() == '\0') {
    return false;
  }
  read_object(scanner, text);
  if (form_ == Form::list && !scanner.take(',') && scanner.peek() != ']') {
    fail(
        scanner.peek() == '\0' ? "the list is cut off: it does not end with ']'"
                               : "expected ',' or ']' after an element, got " +
                                     scanner.describe_next(),
        scanner.at());
  }
  at_ = scanner.at();
  return true;
}

}  // namespace flatshard::data
