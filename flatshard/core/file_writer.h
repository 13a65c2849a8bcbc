#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

namespace flatshard {

/// Writes one new file (an old one of that name is truncated). Every failure,
/// a full disk among them, is an Error{io} that names the file.
class FileWriter {
 public:
  explicit FileWriter(const std::filesystem::path& path);
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;
  /// Closes without flushing: a writer that was not closed has failed.
  ~FileWriter();

  /// Appends; buffered.
  void write(const void* data, std::size_t nbytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Writes at a separate place, past the buffer; does not move the end of the
  /// data that `write` appended.
  void write_at(std::uint64_t offset, const void* data, std::size_t nbytes);
  /// Sets the file's length.
  void resize(std::uint64_t nbytes);
  /// Flushes, waits until the disk has it (fsync) and closes.
  void close();

  const std::filesystem::path& path() const { return path_; }

 private:
  void flush();

  std::filesystem::path path_;
  std::vector<std::byte> buffer_;
  int fd_ = -1;
};

/// Throws Error{io} for a write to `path` that failed by errno, with what can
/// be done about it.
[[noreturn]] void throw_write_error(const std::filesystem::path& path);

/// Returns a name next to `path` to write to before a rename:
/// "<path>.tmp-<process>". Removes files that dead processes of this machine
/// left.
std::filesystem::path temporary_beside(const std::filesystem::path& path);

/// Returns the entries of `folder` that are called `prefix` and the number of a
/// process of this machine that has ended. Empty when there is no such folder.
std::vector<std::filesystem::path> left_by_ended_processes(
    const std::filesystem::path& folder,
    std::string_view prefix);

/// Makes a folder, and those that it is in. @throws Error{io}.
void make_folder(const std::filesystem::path& folder);

/// Waits until a folder's entries (created and renamed files) are on disk.
void sync_folder(const std::filesystem::path& folder);

/// Replaces a file in one step: temporary file next to it, fsync, rename. A
/// reader gets the old content or the new one, never a part.
void write_file_atomic(
    const std::filesystem::path& path,
    std::string_view content);

}  // namespace flatshard
