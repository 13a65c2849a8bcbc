#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace flatshard {

/// The address of a server.
struct HttpServer {
  std::string host;
  std::uint16_t port = 0;
};

/// Parses "http://host:port".
/// @param option  the option that has the text, for the message.
/// @throws Error{config} for another form.
HttpServer parse_http_url(std::string_view url, std::string_view option);

/// Sends `body`, a JSON text, and returns the body of the response. Blocks.
/// @param path  with its first slash.
/// @throws Error{comm} naming the address: nothing answers there, the
/// connection breaks, or the status is not 200. Error{timeout} at `deadline`.
std::string http_post(
    const HttpServer& server,
    std::string_view path,
    const std::string& body,
    std::chrono::steady_clock::time_point deadline);

}  // namespace flatshard
