#include "flatshard/core/http.h"

#include "flatshard/core/error.h"
#include "tests/support/message_of.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <utility>

namespace flatshard {
namespace {

using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

/// A socket that listens on a free port of this machine.
class Listener {
 public:
  Listener() : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* plain = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof(address);
    EXPECT_EQ(::bind(socket_, plain, size), 0);
    EXPECT_EQ(::listen(socket_, 1), 0);
    EXPECT_EQ(::getsockname(socket_, plain, &size), 0);
    server_ = {.host = "127.0.0.1", .port = ntohs(address.sin_port)};
  }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  ~Listener() { ::close(socket_); }

  const HttpServer& server() const { return server_; }

  /// Reads a request that ends with `end`, answers and closes.
  std::string answer(const std::string& text, const std::string& end) const {
    const int peer = ::accept(socket_, nullptr, nullptr);
    std::string request;
    char byte = 0;
    while (!request.ends_with(end) && ::read(peer, &byte, 1) == 1) {
      request += byte;
    }
    EXPECT_EQ(
        ::send(peer, text.data(), text.size(), MSG_NOSIGNAL),
        static_cast<ssize_t>(text.size()));
    ::close(peer);
    return request;
  }

 private:
  int socket_;
  HttpServer server_;
};

std::string post(
    const HttpServer& server,
    std::chrono::milliseconds limit = std::chrono::seconds(20)) {
  return http_post(
      server,
      "/route",
      R"({"a": 1})",
      steady_clock::now() + limit);
}

/// Posts to a server that gives this answer.
std::pair<std::string, std::string> exchange(const std::string& answer) {
  const Listener listener;
  std::string request;
  std::thread server([&] { request = listener.answer(answer, "}"); });
  std::string found;
  const std::string error =
      message_of([&] { found = post(listener.server()); });
  server.join();
  return {request, error == "no error" ? found : error};
}

TEST(HttpTest, SendsJsonAndReturnsTheBody) {
  const auto [request, body] =
      exchange("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone");
  EXPECT_THAT(
      request,
      AllOf(
          HasSubstr("POST /route HTTP/1.1\r\n"),
          HasSubstr("Host: 127.0.0.1:"),
          HasSubstr("Content-Type: application/json\r\n"),
          HasSubstr("Content-Length: 8\r\n"),
          HasSubstr("\r\n\r\n{\"a\": 1}")));
  EXPECT_EQ(body, "done");
}

TEST(HttpTest, AnErrorNamesTheAddressAndTheAnswer) {
  EXPECT_THAT(
      exchange("HTTP/1.1 400 Bad\r\nContent-Length: 5\r\n\r\nwrong").second,
      AllOf(
          HasSubstr("http://127.0.0.1:"),
          HasSubstr("/route: expected status 200, got 400: wrong")));
  // It dies before its answer, and in the middle of it.
  EXPECT_THAT(exchange("").second, HasSubstr("/route: end of stream"));
  EXPECT_THAT(
      exchange("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf").second,
      HasSubstr("/route: partial message"));
}

TEST(HttpTest, AServerThatIsAwayOrSilentIsAnError) {
  HttpServer away;
  {
    const Listener listener;
    away = listener.server();
  }
  EXPECT_THAT(
      message_of([&] { post(away); }),
      HasSubstr("/route: Connection refused"));
  const Listener silent;
  EXPECT_THAT(
      message_of([&] { post(silent.server(), std::chrono::milliseconds(50)); }),
      HasSubstr("/route did not answer in time"));
}

TEST(HttpTest, UrlsHaveAHostAndAPort) {
  const HttpServer server = parse_http_url("http://node-7.x:30000/", "a.key");
  EXPECT_EQ(server.host, "node-7.x");
  EXPECT_EQ(server.port, 30000);
  for (const char* url :
       {"",
        "node:30000",
        "https://node:30000",
        "http://node",
        "http://node:0",
        "http://node:65536",
        "http://node:1/path"}) {
    EXPECT_THAT(
        message_of([&] { parse_http_url(url, "a.key"); }),
        HasSubstr("a.key expected a URL such as"))
        << url;
  }
}

}  // namespace
}  // namespace flatshard
