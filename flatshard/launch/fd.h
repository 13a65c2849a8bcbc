#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "flatshard/core/error.h"

namespace flatshard {

/// A file descriptor that closes itself.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { close(); }
  int get() const { return fd_; }
  void close() {
    if (fd_ >= 0) {
      ::close(std::exchange(fd_, -1));
    }
  }

 private:
  int fd_;
};

/// Returns the result of a call of the system. @throws Error{io} naming the
/// call.
inline int checked_call(int result, const char* call) {
  FLATSHARD_CHECK(result >= 0, io, "{} failed: {}", call, std::strerror(errno));
  return result;
}

}  // namespace flatshard
