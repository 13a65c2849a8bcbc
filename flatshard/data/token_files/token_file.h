#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flatshard/core/file_reader.h"
#include "flatshard/data/token_files/token_words.h"

namespace flatshard::data {

/// A file of tokens that another program has written:
///
///   raw       little-endian words and nothing else (nanoGPT's train.bin)
///   llm.c     256 int32: magic 20240520 (uint16) or 20240801 (uint32),
///   version,
///             number of tokens; then the tokens
///   Megatron  NAME.bin with words, and NAME.idx, which begins with
///             "MMIDIDX" and has their type, sequences and documents
///   NumPy     an array of integers of any shape (np.save), row by row
///
/// The content of the file decides which it is. Other formats and text raise an
/// error.
class TokenFile {
 public:
  /// @param dtype  of raw files: the name of a NumPy type of integers, or ""
  /// for
  ///   uint16.
  /// @throws Error{io}; Error{format} for a file of another format, that is cut
  /// off, or whose words look wider.
  TokenFile(const std::filesystem::path& path, std::string_view dtype);

  const std::filesystem::path& path() const { return words_.path(); }
  /// "raw uint16", "llm.c uint16", "Megatron int32", ...
  const std::string& what() const { return what_; }
  std::int64_t num_tokens() const { return num_tokens_; }
  /// Returns the first token of each document and num_tokens, where the file
  /// has them.
  const std::vector<std::int64_t>& documents() const { return documents_; }

  /// Reads tokens [begin, begin + out.size()).
  /// @param vocab_size  every token must be below it.
  /// @throws Error{format} naming the token that is not, and its place.
  void read(
      std::int64_t begin,
      std::span<std::uint32_t> out,
      std::int64_t vocab_size) const;

 private:
  void check_raw(std::string_view dtype) const;
  void open_raw(const WordType* type);
  bool open_llm_c();
  bool open_numpy();
  bool open_megatron();
  void read_index(const std::filesystem::path& path);

  FileReader words_;
  std::string what_;
  const WordType* type_ = nullptr;  ///< of the words
  std::int64_t data_begin_ = 0;     ///< bytes before the tokens
  std::int64_t num_tokens_ = 0;
  std::vector<std::int64_t> documents_;
};

}  // namespace flatshard::data
