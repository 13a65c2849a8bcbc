#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "flatshard/data/input_kind.h"

namespace flatshard::data {

struct InputFile {
  std::filesystem::path path;  ///< to open
  std::string name;            ///< relative to its input; the split hashes this
  std::int64_t nbytes = 0;     ///< on disk
  bool listed = false;         ///< in a folder or by a glob, not named itself
  std::filesystem::file_time_type modified;
  bool is_link = false;  ///< it, or a folder on the way to it, is a link
  InputKind kind = InputKind::text;
  std::string compression;         ///< "gzip", "zstd" or ""
  std::int64_t num_documents = 1;  ///< that are not empty
};

struct SkippedFile {
  std::string name;
  std::string reason;  ///< "beside the data", "binary", ...
};

struct FoundFiles {
  std::vector<InputFile> files;
  std::vector<SkippedFile> skipped;
  std::int64_t num_links = 0;  ///< that were followed
};

/// Returns the regular files that `inputs` name, each once.
///
/// An input is a file, a folder (all files below it), or a glob: `*`, `?` and
/// `[abc]` within a name, `**` for any number of folders. Hidden files are left
/// out unless a pattern begins with a dot. In folders, and in globs that end
/// with `*` or `**`, files that are not data (see is_beside_data) are left out.
/// Links are followed: a file or folder that several paths reach is taken
/// once, by a path without links if there is one. A link to a folder that the
/// link is in is skipped.
/// Order: inputs as given, within one by name, so that it is the same on every
/// machine.
/// @throws Error{io} when an input matches no file, a folder cannot be read, or
/// a link leads nowhere.
FoundFiles find_input_files(const std::vector<std::string>& inputs);

/// Decides the kind of each file. Takes out what is no text of folders and
/// globs (images, programs), with the reason.
/// @throws what kind_of_file throws; Error{format} for a file that an input
/// names itself and that is no text.
void decide_kinds(FoundFiles& found, InputFormat format);

/// @throws Error{io} when a file has another size or time than when it was
/// found: what was read of it is neither the old content nor the new one.
void check_unchanged(const std::vector<InputFile>& files);

}  // namespace flatshard::data
