#pragma once

#include <cstdint>
#include <string>

namespace flatshard {

/// Returns true for names and addresses of this machine's loopback.
bool is_loopback(const std::string& host);

/// Returns the address of this machine from which packets to `host` leave, e.g.
/// "10.0.0.2"; empty when there is no route or the name is unknown. Sends
/// nothing. A host whose own name leads to loopback (Debian's 127.0.1.1) gets
/// the address of its default route, or else of any interface that is up.
std::string address_towards(const std::string& host, std::uint16_t port);

}  // namespace flatshard
