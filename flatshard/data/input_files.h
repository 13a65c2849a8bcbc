#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace flatshard::data {

struct InputFile {
  std::filesystem::path path;  ///< to open
  std::string name;            ///< relative to its input; the split hashes this
  std::int64_t nbytes = 0;
};

/// The regular files that `inputs` name, each once.
///
/// An input is a file, a folder (all files below it, hidden ones left out), or
/// a glob: `*`, `?` and `[abc]` within a name, `**` for any number of folders.
/// Order: inputs as given, within one by name, so that it is the same on every
/// machine. Links to folders are not followed.
/// @throws Error{io} when an input matches no file or a folder cannot be read.
std::vector<InputFile> find_input_files(const std::vector<std::string>& inputs);

}  // namespace flatshard::data
