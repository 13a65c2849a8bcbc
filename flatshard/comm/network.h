#pragma once

#include <cstdint>
#include <string>

namespace flatshard {

/// Returns true for names and addresses of this machine's loopback.
bool is_loopback(const std::string& host);

/// Returns this machine's source address of packets to `host`, e.g. "10.0.0.2";
/// empty when there is no route or the name is unknown. Sends nothing. If the
/// name of a host resolves to loopback (Debian's 127.0.1.1), returns the
/// address of its default route, or of any interface that is up.
std::string address_towards(const std::string& host, std::uint16_t port);

}  // namespace flatshard
