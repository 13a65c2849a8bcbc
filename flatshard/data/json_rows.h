#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "flatshard/data/json_scanner.h"
#include "flatshard/data/text_reader.h"

namespace flatshard::data {

/// The documents of a JSON file: objects, one in each line or as elements of
/// one list, that have a document in the text field. A file whose first object
/// takes several lines, or that is a list, is held in memory as a whole.
class JsonRows {
 public:
  /// @throws what TextReader throws.
  /// @param whole_rows  documents are the objects themselves, as JSON, and not
  ///   the text in `text_field`.
  JsonRows(
      const std::filesystem::path& path,
      std::string text_field,
      bool whole_rows = false);

  /// Reads the next document, "" where the text is empty or null; false at the
  /// end.
  /// @throws Error{format} naming the line, and the fields that it has.
  bool next(std::string& text);
  /// Returns the line where the last document's object begins, from 1.
  std::int64_t line() const { return row_line_; }

 private:
  enum class Form { unknown, lines, list, objects };

  bool next_line();
  void find_form();
  bool next_of_whole(std::string& text);
  std::int64_t line_at(std::size_t at) const;
  void check_utf8(
      const std::string& text,
      const std::string& where,
      std::size_t at) const;
  void read_object(JsonScanner& scanner, std::string& text);
  [[noreturn]] void fail(const std::string& what, std::size_t at) const;

  std::filesystem::path path_;
  std::string text_field_;
  bool whole_rows_;
  TextReader reader_;
  Form form_ = Form::unknown;
  std::string json_;       ///< a line, or the whole file
  std::size_t at_ = 0;     ///< in it
  std::int64_t line_ = 0;  ///< of the beginning of json_, from 1
  std::int64_t row_line_ = 0;
};

}  // namespace flatshard::data
