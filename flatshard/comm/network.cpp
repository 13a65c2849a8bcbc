#include "flatshard/comm/network.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <memory>

namespace flatshard {
namespace {

// A documentation address: only its route matters, nothing is sent.
constexpr const char* kSomewhereElse = "192.0.2.1";

std::string numeric(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  const int failed = ::getnameinfo(
      address,
      length,
      text.data(),
      text.size(),
      nullptr,
      0,
      NI_NUMERICHOST);
  return failed != 0 ? std::string() : std::string(text.data());
}

// connect on a datagram socket chooses the route and the source address.
std::string source_address(const std::string& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* list = nullptr;
  if (::getaddrinfo(
          host.c_str(),
          std::to_string(port).c_str(),
          &hints,
          &list) != 0) {
    return {};
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(
      list,
      ::freeaddrinfo);
  for (const addrinfo* at = list; at != nullptr; at = at->ai_next) {
    const int fd = ::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, 0);
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    auto* generic = reinterpret_cast<sockaddr*>(&own);
    const bool found = fd >= 0 &&
                       ::connect(fd, at->ai_addr, at->ai_addrlen) == 0 &&
                       ::getsockname(fd, generic, &length) == 0;
    if (fd >= 0) {
      ::close(fd);
    }
    if (found) {
      return numeric(generic, length);
    }
  }
  return {};
}

std::string any_interface() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) {
    return {};
  }
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(
      list,
      ::freeifaddrs);
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr != nullptr && at->ifa_addr->sa_family == AF_INET &&
        (at->ifa_flags & IFF_UP) != 0 && (at->ifa_flags & IFF_LOOPBACK) == 0) {
      return numeric(at->ifa_addr, sizeof(sockaddr_in));
    }
  }
  return {};
}

}  // namespace

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

std::string address_towards(const std::string& host, std::uint16_t port) {
  std::string own = source_address(host, port);
  if (is_loopback(host) || (!own.empty() && !is_loopback(own))) {
    return own;
  }
  if (own.empty()) {
    return {};
  }
  for (const std::string& other :
       {source_address(kSomewhereElse, port), any_interface()}) {
    if (!other.empty() && !is_loopback(other)) {
      return other;
    }
  }
  return own;
}

}  // namespace flatshard
