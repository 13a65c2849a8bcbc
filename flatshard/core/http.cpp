#include "flatshard/core/http.h"

#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>

#include <regex>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using asio::ip::tcp;
using ErrorOfSystem = boost::system::error_code;

// Of an error page.
constexpr std::size_t kMostShown = 300;

}  // namespace

HttpServer parse_http_url(std::string_view url, std::string_view option) {
  static const std::regex form(R"(http://([^/:\s]+):(\d{1,5})/?)");
  std::cmatch parts;
  const bool matches =
      std::regex_match(url.data(), url.data() + url.size(), parts, form);
  const int port = matches ? std::stoi(parts[2]) : 0;
  FLATSHARD_CHECK(
      matches && port >= 1 && port <= 65535,
      config,
      "{} expected a URL such as \"http://127.0.0.1:30000\", got \"{}\"",
      option,
      url);
  return {.host = parts[1], .port = static_cast<std::uint16_t>(port)};
}

std::string http_post(
    const HttpServer& server,
    std::string_view path,
    const std::string& body,
    std::chrono::steady_clock::time_point deadline) {
  const std::string place =
      fmt::format("http://{}:{}{}", server.host, server.port, path);
  asio::io_context io;
  // Starts an operation, and waits until it ends or for the deadline.
  const auto run = [&](auto&& start) {
    bool ended = false;
    ErrorOfSystem error;
    start([&ended, &error](ErrorOfSystem result) {
      ended = true;
      error = result;
    });
    io.restart();
    io.run_until(deadline);
    FLATSHARD_CHECK(ended, timeout, "{} did not answer in time", place);
    FLATSHARD_CHECK(!error, comm, "{}: {}", place, error.message());
  };

  tcp::resolver resolver(io);
  tcp::resolver::results_type addresses;
  run([&](auto ended) {
    resolver.async_resolve(
        server.host,
        std::to_string(server.port),
        [&addresses, ended](ErrorOfSystem error, auto found) {
          addresses = std::move(found);
          ended(error);
        });
  });
  tcp::socket socket(io);
  run([&](auto ended) {
    asio::async_connect(
        socket,
        addresses,
        [ended](ErrorOfSystem error, const auto& /*address*/) {
          ended(error);
        });
  });

  constexpr int kHttp11 = 11;
  http::request<http::string_body> request(
      http::verb::post,
      {path.data(), path.size()},
      kHttp11,
      body);
  request.set(
      http::field::host,
      fmt::format("{}:{}", server.host, server.port));
  request.set(http::field::content_type, "application/json");
  request.set(http::field::connection, "close");
  request.prepare_payload();
  run([&](auto ended) {
    http::async_write(
        socket,
        request,
        [ended](ErrorOfSystem error, std::size_t /*nbytes*/) { ended(error); });
  });
  boost::beast::flat_buffer buffer;
  http::response<http::string_body> response;
  run([&](auto ended) {
    http::async_read(
        socket,
        buffer,
        response,
        [ended](ErrorOfSystem error, std::size_t /*nbytes*/) { ended(error); });
  });
  FLATSHARD_CHECK(
      response.result() == http::status::ok,
      comm,
      "{}: expected status 200, got {}: {}",
      place,
      response.result_int(),
      response.body().substr(0, kMostShown));
  return std::move(response).body();
}

}  // namespace flatshard
