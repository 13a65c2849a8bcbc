#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace flatshard::data {

enum class InputKind {
  text,     ///< the file is one document
  jsonl,    ///< each line is a JSON object with a document in a field
  parquet,  ///< each row has a document in a column
};

struct InputFile {
  std::filesystem::path path;  ///< to open
  std::string name;            ///< relative to its input; the split hashes this
  std::int64_t nbytes = 0;
  bool listed = false;  ///< in a folder or by a glob, not named itself
  std::int64_t num_documents = 1;  ///< that are not empty

  /// By the name's end: .jsonl, .parquet, or anything else.
  InputKind kind() const;
};

/// The regular files that `inputs` name, each once.
///
/// An input is a file, a folder (all files below it, hidden ones left out), or
/// a glob: `*`, `?` and `[abc]` within a name, `**` for any number of folders.
/// Order: inputs as given, within one by name, so that it is the same on every
/// machine. Links to folders are not followed.
/// @throws Error{io} when an input matches no file or a folder cannot be read.
std::vector<InputFile> find_input_files(const std::vector<std::string>& inputs);

/// Takes out the text files that are none: Python's .pyc, and those with a NUL
/// among their first 8 KiB. Files that an input named itself stay.
/// @return what was taken out.
std::vector<InputFile> take_binary_files(std::vector<InputFile>& files);

}  // namespace flatshard::data
