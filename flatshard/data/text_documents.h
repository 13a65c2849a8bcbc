#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flatshard/data/input_files.h"
#include "flatshard/data/json_rows.h"
#include "flatshard/data/python_tokenizer.h"

namespace flatshard::data {

/// How the texts of files are read.
struct TextOptions {
  std::string text_field = "text";  ///< of JSON rows and Parquet
  bool replace_invalid = false;     ///< bytes that are not UTF-8 become U+FFFD
  std::string python;               ///< for Parquet; see find_python
  bool whole_rows = false;  ///< of JSON, as JSON; no other files are read
};

/// The texts of files, in UTF-8, one file after the other. Each text is held
/// in memory as a whole.
class TextDocuments {
 public:
  /// @param files  must outlive this.
  TextDocuments(const std::vector<InputFile>& files, TextOptions options);

  /// Goes to the next file. @return its index; nothing after the last one.
  std::optional<std::size_t> next_file();
  /// Reads the next text of the file that is not empty; false at its end.
  /// @throws Error{format} naming the file, and the line or row, of what is no
  /// text; Error{io}.
  bool next_text(std::string& text);

  /// Returns the place of the last text: "FILE:LINE" of a JSON row, else
  /// "FILE".
  std::string where() const;

  std::int64_t num_empty() const { return num_empty_; }
  /// Returns the number of bytes that replace_invalid replaced.
  std::int64_t num_replaced() const { return num_replaced_; }

 private:
  bool read_text(std::string& text);
  bool read_whole(std::string& text);

  const std::vector<InputFile>& files_;
  TextOptions options_;
  std::size_t file_ = 0;
  bool begun_ = false;
  bool at_end_ = false;
  std::optional<JsonRows> rows_;
  std::optional<PythonChild> parquet_;
  std::int64_t num_empty_ = 0;
  std::int64_t num_replaced_ = 0;
};

}  // namespace flatshard::data
