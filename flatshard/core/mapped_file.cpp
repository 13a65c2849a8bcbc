#include "flatshard/core/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/core/placeholder.h"

namespace flatshard {

MappedFile::MappedFile(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  FLATSHARD_CHECK(
      fd >= 0,
      io,
      "cannot open {}: {}",
      path.string(),
      std::strerror(errno));
  struct stat status {};
  const bool is_file = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  const auto size = static_cast<std::size_t>(is_file ? status.st_size : 0);
  void* address = nullptr;
  int error = 0;
  if (size > 0) {
    address = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    error = address == MAP_FAILED ? errno : 0;
  }
  ::close(fd);
  FLATSHARD_CHECK(
      is_file,
      io,
      "expected a regular file, got {}",
      path.string());
  FLATSHARD_CHECK(
      error == 0,
      io,
      "cannot map {}: {}",
      path.string(),
      std::strerror(error));
  bytes_ = {static_cast<const std::byte*>(address), size};
  try {
    refuse_placeholder(path, text().substr(0, kPlaceholderHead));
  } catch (...) {
    unmap();  // an unfinished object has no destructor
    throw;
  }
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : bytes_(std::exchange(other.bytes_, {})) {
}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this != &other) {
    unmap();
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}

MappedFile::~MappedFile() {
  unmap();
}

void MappedFile::unmap() noexcept {
  if (!bytes_.empty()) {
    ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
  bytes_ = {};
}

}  // namespace flatshard
