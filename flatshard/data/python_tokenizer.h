#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard::data {

/// Returns the interpreter for the tokenizers and pyarrow packages: `wanted`,
/// else $FLATSHARD_PYTHON, else .venv/bin/python of the working folder, of the
/// program's folder or of the one above, else python3.
std::string find_python(const std::string& wanted);

/// How to reach a tokenizer.json, and texts in Parquet files.
struct PythonTokenizerOptions {
  std::string python;               ///< see find_python
  std::filesystem::path tokenizer;  ///< empty: none, texts come as bytes
  std::string end_of_document;      ///< token text; "" = the tokenizer's own
  /// Token text; "" = the tokenizer's own, "none" = none.
  std::string begin_of_document;
  std::string text_field = "text";  ///< column of .parquet files
  /// Control tokens that a text spells out become these tokens.
  bool parse_special = false;
  bool keep_special = false;  ///< `decode` writes control tokens out
  /// The trained part of chats: "assistant", "all" or "last"; see hf_chat.py.
  std::string train_on;
  /// Variables of the chat template: JSON text of an object; "" = none.
  std::string chat_template_kwargs;
};

/// A child process that runs python/flatshard/prepare_tokens.py with standard
/// input and output connected to this one. It imports no module of the working
/// folder.
class PythonChild {
 public:
  /// @param mode  see prepare_tokens.py.
  /// @param input  all of its standard input; unset: `send` gives it.
  /// @throws Error{config} when Python cannot be started, lacks a package, or
  /// cannot load the tokenizer.
  PythonChild(
      const PythonTokenizerOptions& options,
      const std::string& mode,
      std::optional<std::string_view> input);
  PythonChild(const PythonChild&) = delete;
  PythonChild& operator=(const PythonChild&) = delete;
  /// Ends the child when it still runs.
  ~PythonChild();

  std::int64_t vocab_size() const { return vocab_size_; }
  std::int64_t end_of_document() const { return end_of_document_; }
  std::optional<std::int64_t> begin_of_document() const {
    return begin_of_document_;
  }
  /// Returns the tokens that the tokenizer itself puts before a text.
  const std::vector<std::int64_t>& own_begin() const { return own_begin_; }

  /// Gives the child more input; false when it reads no more.
  bool send(std::string_view bytes);
  /// Ends its input.
  void end_input();
  /// Ends the child, from any thread; `send` and `read` fail then.
  void kill();

  /// Reads bytes. Warnings of the child that come before are logged.
  /// @throws Error{format} with the child's message on a row or file of another
  /// format. Error{io} means a file that cannot be read, or the child's early
  /// end.
  void read(void* out, std::size_t nbytes);
  std::int64_t read_count();
  std::string read_text();
  /// Reads the next text of the file that is read; false at its end.
  bool read_text_of_file(std::string& text);

 private:
  void read_header();
  void end();
  void start(
      const PythonTokenizerOptions& options,
      const std::string& mode,
      int input,
      int output);
  std::int64_t read_frame();
  void read_bytes(std::string& text, std::int64_t nbytes);

  std::string python_;
  int pid_ = -1;
  int input_ = -1;  ///< a socket
  std::FILE* stream_ = nullptr;
  std::int64_t vocab_size_ = 0;
  std::int64_t end_of_document_ = 0;
  std::optional<std::int64_t> begin_of_document_;
  std::vector<std::int64_t> own_begin_;
};

}  // namespace flatshard::data
