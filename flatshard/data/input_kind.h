#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace flatshard::data {

enum class InputKind {
  text,     ///< the file is one document
  json,     ///< JSON objects, each with a document in a field
  parquet,  ///< each row has a document in a column
  bytes,    ///< the file is one document, of bytes that need not be text
};

/// The values of --format.
enum class InputFormat { automatic, text, json, parquet, bytes };

/// @param name  auto, text, json (or jsonl), parquet or bytes.
/// @throws Error{config} naming --format.
InputFormat parse_input_format(std::string_view name);

/// How a file is read.
struct KindOfFile {
  InputKind kind = InputKind::text;
  std::string compression;  ///< "gzip", "zstd" or ""
  /// Nonempty: it is left out when a folder or a glob has it. The reason.
  std::string not_text;
};

/// Decides how a file is read: by its first bytes, and where they leave it open
/// by the end of its name. Names end with .jsonl, .ndjson and .json in any
/// case, also before .gz or .zst.
/// @throws Error{format} naming the file, what it seems to be and --format,
/// where it is neither text nor a kind that can be read; Error{io}.
KindOfFile kind_of_file(const std::filesystem::path& path, InputFormat format);

/// Returns the container ("a zip archive; unpack it") that a file's first bytes
/// or the end of its name show. Empty: none.
std::string_view container_of(
    const std::filesystem::path& path,
    std::string_view head);

/// Returns whether a file of this name goes with data and is none: README,
/// licences, .gitattributes, checksums and so on.
bool is_beside_data(std::string_view name);

}  // namespace flatshard::data
