#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard::data {

/// Returns the interpreter for the Python package: `wanted`, else
/// $FLATSHARD_PYTHON, else .venv/bin/python of the working folder, of the
/// program's folder or of the one above, else python3.
std::string find_python(const std::string& wanted);

/// Becomes a Python that runs a module of the Python package next to the
/// program. It imports nothing from the working folder.
/// @param module  its name in the package: "prepare".
/// @throws Error{config} when Python cannot be started.
[[noreturn]] void exec_python(
    const std::string& python,
    const std::string& module,
    const std::vector<std::string>& arguments);

/// Options to run a tokenizer.json.
struct PythonTokenizerOptions {
  std::string python;  ///< see find_python
  std::filesystem::path tokenizer;
  /// Control tokens that a text spells out become these tokens.
  bool parse_special = false;
  bool keep_special = false;  ///< `decode` writes control tokens out
  /// Variables of the chat template: JSON text of an object; "" = none.
  std::string chat_template_kwargs;
};

/// A child process that runs python/flatshard/_data/client.py.
class PythonChild {
 public:
  /// @param mode  see client.py.
  /// @param input  all of its standard input.
  /// @throws Error{config} when Python cannot be started, lacks a package, or
  /// cannot load the tokenizer.
  PythonChild(
      const PythonTokenizerOptions& options,
      const std::string& mode,
      std::string_view input);
  PythonChild(const PythonChild&) = delete;
  PythonChild& operator=(const PythonChild&) = delete;
  /// Ends the child when it still runs.
  ~PythonChild();

  /// Returns the tokens that the tokenizer itself puts before a text.
  const std::vector<std::int64_t>& own_begin() const { return own_begin_; }

  /// Reads a frame of token ids. Warnings of the child that come before are
  /// logged.
  /// @throws Error{format} with the child's message on a row; Error{io} on its
  /// early end.
  std::vector<std::int64_t> read_tokens();
  std::string read_text();

 private:
  void read_header();
  void end();
  void read(void* out, std::size_t nbytes);
  std::int64_t read_count();
  std::string read_bytes(std::int64_t nbytes);

  std::string python_;
  int pid_ = -1;
  std::FILE* stream_ = nullptr;
  std::vector<std::int64_t> own_begin_;
};

}  // namespace flatshard::data
