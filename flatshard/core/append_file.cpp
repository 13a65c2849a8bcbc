#include "flatshard/core/append_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"

namespace flatshard {

AppendFile::AppendFile(std::filesystem::path path, Mode mode)
    : path_(std::move(path)) {
  open(mode == Mode::append ? 0 : O_TRUNC);
}

AppendFile::~AppendFile() {
  ::close(fd_);
}

void AppendFile::open(int flags) {
  fd_ = ::open(
      path_.c_str(),
      O_WRONLY | O_CREAT | O_CLOEXEC | O_APPEND | flags,
      0666);
  FLATSHARD_CHECK(
      fd_ >= 0,
      io,
      "cannot write {}: {}",
      path_.string(),
      std::strerror(errno));
}

void AppendFile::reopen() {
  ::close(std::exchange(fd_, -1));
  open(0);
}

void AppendFile::append(std::string_view record) {
  const off_t before = ::lseek(fd_, 0, SEEK_END);
  std::size_t done = 0;
  while (done < record.size()) {
    const ssize_t n = ::write(fd_, record.data() + done, record.size() - done);
    if (n < 0 && errno == EINTR) {
      continue;
    }
    if (n < 0) {
      const int error = errno;
      if (done > 0 && before >= 0 && ::ftruncate(fd_, before) != 0) {
        log_warning("{} ends with a part of a record", path_.string());
      }
      FLATSHARD_THROW(
          io,
          "cannot write {}: {}",
          path_.string(),
          std::strerror(error));
    }
    done += static_cast<std::size_t>(n);
  }
}

}  // namespace flatshard
