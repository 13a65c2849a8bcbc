#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace flatshard::data {

/// The documents of a .jsonl file: each line is a JSON object that has one in
/// the text field. Blank lines, and texts that are empty or null, are left out.
class JsonLines {
 public:
  /// @throws Error{io} when it cannot be opened.
  JsonLines(std::filesystem::path path, std::string text_field);

  /// The next document; false at the end.
  /// @throws Error{format} naming the line, and the fields that it has.
  bool next(std::string& text);

 private:
  std::filesystem::path path_;
  std::string text_field_;
  std::ifstream file_;
  std::int64_t line_ = 0;
};

}  // namespace flatshard::data
