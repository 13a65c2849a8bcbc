#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "flatshard/data/byte_reader.h"

namespace flatshard::data {

/// Reads the text of a file in UTF-8: without compression and byte order mark,
/// and from UTF-16 when its byte order mark shows that. Bytes that are not
/// UTF-8 pass through.
class TextReader {
 public:
  /// @throws what ByteReader throws; Error{format} for UTF-32.
  explicit TextReader(std::filesystem::path path);

  /// Appends more text. @return false at the end.
  /// @throws Error{format} when UTF-16 ends within a character.
  bool read(std::string& text);
  /// Returns all that is left.
  std::string read_all();
  /// Reads the next line without its '\n'; false at the end.
  bool read_line(std::string& line);

 private:
  enum class Encoding { utf8, utf16_le, utf16_be };

  void begin();
  bool read_bytes();
  void decode_utf16(std::string& text, bool at_end);

  std::filesystem::path path_;
  std::unique_ptr<ByteReader> bytes_;
  Encoding encoding_ = Encoding::utf8;
  std::string pending_;  ///< bytes that are not yet text
  std::vector<char> chunk_;
  std::string buffer_;  ///< of read_line
  std::size_t buffer_at_ = 0;
};

}  // namespace flatshard::data
