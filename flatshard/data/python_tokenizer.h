#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
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
  bool keep_special = false;  ///< decoding writes control tokens out
  /// Variables of the chat template: JSON text of an object; "" = none.
  std::string chat_template_kwargs;
};

using TokenLists = std::vector<std::vector<std::int64_t>>;

/// The answer of python/flatshard/_data/client.py.
struct PythonAnswer {
  std::vector<std::string> texts;
  TokenLists tokens;
  /// The tokens that the tokenizer itself puts before a text.
  std::vector<std::int64_t> own_begin;
};

/// Runs python/flatshard/_data/client.py once, and logs its warnings.
/// @param mode  client.py describes it and the other arguments.
/// @throws Error{config} when Python cannot be started, ends early, lacks a
/// package, or cannot load the tokenizer; Error{format} with the message of
/// client.py on a row.
PythonAnswer ask_python(
    const PythonTokenizerOptions& options,
    const std::string& mode,
    const std::vector<std::string>& texts,
    const TokenLists& tokens = {});

}  // namespace flatshard::data
