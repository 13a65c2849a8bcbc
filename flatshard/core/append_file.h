#pragma once

#include <filesystem>
#include <string_view>

namespace flatshard {

/// A file that grows by records while others read it. Every failure is an
/// Error{io} that names the file.
class AppendFile {
 public:
  enum class Mode { truncate, append };

  explicit AppendFile(std::filesystem::path path, Mode mode);
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;
  ~AppendFile();

  /// Writes a record to the operating system, all of it or nothing: a record
  /// that does not fit the disk is undone.
  void append(std::string_view record);
  /// Opens the path again, after another file replaced it.
  void reopen();

  const std::filesystem::path& path() const { return path_; }

 private:
  void open(int flags);

  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace flatshard
