#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>

namespace flatshard::data {

/// The bytes of a file from its start, once, without its compression.
class ByteReader {
 public:
  virtual ~ByteReader() = default;

  /// Fills the front of `out`. @return how many bytes; 0 at the end.
  /// @throws Error{io} naming the file that cannot be read; Error{format} when
  /// compressed data is damaged, cut off, or followed by something else.
  virtual std::size_t read(std::span<char> out) = 0;

  /// "gzip", "zstd", or "" when the file is not compressed.
  virtual std::string_view compression() const { return ""; }

  /// Opens a file. Its first bytes decide the compression, not its name. All
  /// members of a gzip file and all frames of a zstd file are read.
  static std::unique_ptr<ByteReader> open(const std::filesystem::path& path);
  /// Opens a file whose bytes are taken as they are.
  static std::unique_ptr<ByteReader> open_raw(
      const std::filesystem::path& path);
};

/// Returns whether bytes begin a gzip or zstd stream.
bool begins_gzip(std::string_view bytes);
bool begins_zstd(std::string_view bytes);

}  // namespace flatshard::data
