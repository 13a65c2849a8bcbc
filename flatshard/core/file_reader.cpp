#include "flatshard/core/file_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/core/placeholder.h"

namespace flatshard {

FileReader::FileReader(const std::filesystem::path& path) : path_(path) {
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const int error = errno;
  FLATSHARD_CHECK(
      fd_ >= 0,
      io,
      "cannot open {}: {}{}",
      path.string(),
      std::strerror(error),
      error == EMFILE ? "; raise the limit on open files (ulimit -n)" : "");
  struct stat status {};
  if (::fstat(fd_, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(fd_);
    FLATSHARD_THROW(io, "expected a regular file, got {}", path.string());
  }
  nbytes_ = status.st_size;
  std::array<char, kPlaceholderHead> head{};
  const ssize_t n = ::pread(fd_, head.data(), head.size(), 0);
  try {
    refuse_placeholder(
        path,
        {head.data(), static_cast<std::size_t>(std::max<ssize_t>(n, 0))});
  } catch (...) {
    ::close(fd_);  // an unfinished object has no destructor
    throw;
  }
}

FileReader::FileReader(FileReader&& other) noexcept
    : path_(std::move(other.path_)),
      nbytes_(std::exchange(other.nbytes_, 0)),
      fd_(std::exchange(other.fd_, -1)) {
}

FileReader& FileReader::operator=(FileReader&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(nbytes_, other.nbytes_);
  std::swap(fd_, other.fd_);
  return *this;
}

FileReader::~FileReader() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

void FileReader::read_at(std::int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t n = ::pread(fd_, out.data(), out.size(), offset);
    if (n < 0 && errno == EINTR) {
      continue;
    }
    FLATSHARD_CHECK(
        n >= 0,
        io,
        "cannot read {}: {}",
        path_.string(),
        std::strerror(errno));
    if (n == 0) {
      struct stat status {};
      ::fstat(fd_, &status);
      FLATSHARD_CHECK(
          status.st_size >= nbytes_,
          io,
          "{}: expected {} bytes, the size when it was opened, got {}; the "
          "file was truncated while in use: restore it and restart",
          path_.string(),
          nbytes_,
          status.st_size);
      FLATSHARD_THROW(
          format,
          "{}: expected {} more bytes at byte {}, but the file ends there; it "
          "is truncated",
          path_.string(),
          out.size(),
          offset);
    }
    out = out.subspan(static_cast<std::size_t>(n));
    offset += n;
  }
}

}  // namespace flatshard
