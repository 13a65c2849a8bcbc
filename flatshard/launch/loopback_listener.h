#pragma once

#include <cstdint>

namespace flatshard {

/// A listening socket on a free port of 127.0.0.1. While it is open, no other
/// process gets the port. A child process may inherit it and serve on it.
class LoopbackListener {
 public:
  /// @throws Error{io}
  LoopbackListener();
  ~LoopbackListener();
  LoopbackListener(const LoopbackListener&) = delete;
  LoopbackListener& operator=(const LoopbackListener&) = delete;

  /// Closed by exec unless FD_CLOEXEC is cleared.
  int fd() const { return fd_; }
  std::uint16_t port() const { return port_; }

 private:
  int fd_ = -1;
  std::uint16_t port_ = 0;
};

}  // namespace flatshard
