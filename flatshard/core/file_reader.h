#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

namespace flatshard {

/// A file that stays open and is read at places. Move-only; safe to read from
/// several threads.
///
/// Unlike a MappedFile it survives a file that is truncated while it is in use:
/// that is an error here, and a SIGBUS there. One that is removed can still be
/// read.
class FileReader {
 public:
  FileReader() = default;
  /// @throws Error{io} when it cannot be opened or is not a regular file.
  explicit FileReader(const std::filesystem::path& path);
  FileReader(FileReader&& other) noexcept;
  FileReader& operator=(FileReader&& other) noexcept;
  ~FileReader();

  const std::filesystem::path& path() const { return path_; }
  /// Returns the length when it was opened.
  std::int64_t nbytes() const { return nbytes_; }

  /// Fills `out` from byte `offset` on.
  /// @throws Error{io} with the file's name, when it has become shorter with
  /// both sizes; Error{format} when it never had these bytes.
  void read_at(std::int64_t offset, std::span<std::byte> out) const;

 private:
  std::filesystem::path path_;
  std::int64_t nbytes_ = 0;
  int fd_ = -1;
};

}  // namespace flatshard
