#include "flatshard/core/file_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{1} << 20;

}  // namespace

void throw_write_error(const std::filesystem::path& path) {
  const int error = errno;
  FLATSHARD_THROW(
      io,
      "cannot write {}: {}{}",
      path.string(),
      std::strerror(error),
      error == ENOSPC || error == EDQUOT
          ? "; free some space or choose another output folder"
      : error == EFBIG ? "; raise the limit on file sizes (ulimit -f)"
                       : "");
}

FileWriter::FileWriter(const std::filesystem::path& path) : path_(path) {
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) {
    throw_write_error(path_);
  }
  buffer_.reserve(kBufferBytes);
}

FileWriter::~FileWriter() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

void FileWriter::write(const void* data, std::size_t nbytes) {
  const auto* bytes = static_cast<const std::byte*>(data);
  while (nbytes > 0) {
    const std::size_t part = std::min(nbytes, kBufferBytes - buffer_.size());
    buffer_.insert(buffer_.end(), bytes, bytes + part);
    bytes += part;
    nbytes -= part;
    if (buffer_.size() == kBufferBytes) {
      flush();
    }
  }
}

void FileWriter::write_at(
    std::uint64_t offset,
    const void* data,
    std::size_t nbytes) {
  const auto* bytes = static_cast<const std::byte*>(data);
  while (nbytes > 0) {
    const ssize_t n = ::pwrite(fd_, bytes, nbytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) {
      continue;
    }
    if (n < 0) {
      throw_write_error(path_);
    }
    bytes += n;
    offset += static_cast<std::uint64_t>(n);
    nbytes -= static_cast<std::size_t>(n);
  }
}

void FileWriter::resize(std::uint64_t nbytes) {
  if (::ftruncate(fd_, static_cast<off_t>(nbytes)) != 0) {
    throw_write_error(path_);
  }
}

void FileWriter::flush() {
  std::size_t done = 0;
  while (done < buffer_.size()) {
    const ssize_t n =
        ::write(fd_, buffer_.data() + done, buffer_.size() - done);
    if (n < 0 && errno == EINTR) {
      continue;
    }
    if (n < 0) {
      throw_write_error(path_);
    }
    done += static_cast<std::size_t>(n);
  }
  buffer_.clear();
}

void FileWriter::close() {
  flush();
  // EINVAL and EROFS: a pipe or a device. These have nothing to sync.
  if (::fsync(fd_) != 0 && errno != EINVAL && errno != EROFS) {
    throw_write_error(path_);
  }
  const int fd = fd_;
  fd_ = -1;
  if (::close(fd) != 0) {
    throw_write_error(path_);
  }
}

std::vector<std::filesystem::path> left_by_ended_processes(
    const std::filesystem::path& folder,
    std::string_view prefix) {
  std::vector<std::filesystem::path> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(prefix)) {
      continue;
    }
    pid_t pid = 0;
    const char* end = name.data() + name.size();
    const auto parsed = std::from_chars(name.data() + prefix.size(), end, pid);
    if (parsed.ec == std::errc() && parsed.ptr == end && pid > 0 &&
        ::kill(pid, 0) != 0 && errno == ESRCH) {
      found.push_back(entry.path());
    }
  }
  return found;
}

std::filesystem::path temporary_beside(const std::filesystem::path& path) {
  const auto folder = path.has_parent_path() ? path.parent_path() : ".";
  for (const std::filesystem::path& left :
       left_by_ended_processes(folder, path.filename().string() + ".tmp-")) {
    ::unlink(left.c_str());
  }
  std::filesystem::path partial = path;
  partial += fmt::format(".tmp-{}", ::getpid());
  return partial;
}

void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  FLATSHARD_CHECK(
      !error,
      io,
      "cannot make {}: {}",
      folder.string(),
      error.message());
}

void sync_folder(const std::filesystem::path& folder) {
  const std::filesystem::path target = folder.empty() ? "." : folder;
  const int fd = ::open(target.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) {
    throw_write_error(target);
  }
  // Some network file systems cannot sync a folder. Their rename is enough.
  ::fsync(fd);
  ::close(fd);
}

void write_file_atomic(
    const std::filesystem::path& path,
    std::string_view content) {
  const std::filesystem::path partial = temporary_beside(path);
  try {
    FileWriter writer(partial);
    writer.write(content);
    writer.close();
    if (::rename(partial.c_str(), path.c_str()) != 0) {
      throw_write_error(path);
    }
  } catch (...) {
    ::unlink(partial.c_str());
    throw;
  }
  sync_folder(path.parent_path());
}

}  // namespace flatshard
