#include "flatshard/launch/loopback_listener.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "flatshard/core/error.h"

namespace flatshard {

LoopbackListener::LoopbackListener() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd_ < 0 || ::bind(fd_, generic, length) != 0 ||
      ::listen(fd_, SOMAXCONN) != 0 ||
      ::getsockname(fd_, generic, &length) != 0) {
    const int reason = errno;
    ::close(fd_);
    FLATSHARD_THROW(
        io,
        "cannot listen on 127.0.0.1: {}",
        std::strerror(reason));
  }
  port_ = ntohs(address.sin_port);
}

LoopbackListener::~LoopbackListener() {
  ::close(fd_);
}

}  // namespace flatshard
