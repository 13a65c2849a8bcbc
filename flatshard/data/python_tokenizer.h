#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard::data {

/// The interpreter for the tokenizers package: `wanted`, else
/// $FLATSHARD_PYTHON, else .venv/bin/python of the working folder, else
/// python3.
std::string find_python(const std::string& wanted);

/// A child process that tokenizes with the Hugging Face tokenizers package
/// (python/flatshard/prepare_tokens.py). Not thread-safe.
class PythonTokenizer {
 public:
  struct Options {
    std::string python;  ///< see find_python
    std::filesystem::path tokenizer;
    std::string end_of_document;  ///< token text; "" = the usual names
  };

  /// Starts the child on `documents`, whose tokens come in the same order.
  /// @param list_file  where to put the list for the child; must be writable.
  /// @throws Error{config} when Python or its package is missing, or the
  /// tokenizer cannot be loaded.
  PythonTokenizer(
      const Options& options,
      const std::vector<std::filesystem::path>& documents,
      const std::filesystem::path& list_file);
  PythonTokenizer(const PythonTokenizer&) = delete;
  PythonTokenizer& operator=(const PythonTokenizer&) = delete;
  /// Ends the child when it still runs.
  ~PythonTokenizer();

  std::int64_t vocab_size() const { return vocab_size_; }
  std::int64_t end_of_document() const { return end_of_document_; }

  /// The next document's tokens, without an end-of-document token.
  /// @throws Error{io} when the child could not read it or ended.
  void next(std::vector<std::uint32_t>& tokens);

  /// One-shot use: text to tokens and back.
  static std::vector<std::int64_t> encode(
      const Options& options,
      std::string_view text);
  static std::string decode(
      const Options& options,
      const std::vector<std::int64_t>& tokens);

 private:
  [[noreturn]] void throw_ended();
  void read_exactly(void* out, std::size_t nbytes);

  std::string python_;
  int pid_ = -1;
  std::FILE* stream_ = nullptr;
  std::int64_t vocab_size_ = 0;
  std::int64_t end_of_document_ = 0;
};

}  // namespace flatshard::data
