// SPDX-License-Identifier: Apache-2.0
#include "server/ops/http_server.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class HttpServerTest : public testing::Test {
 protected:
  void SetUp() override {
    HttpServer::Pages pages;
    pages["/a"] = [] { return HttpServer::Answer{.body = "of a\n"}; };
    pages["/large"] = [] { return HttpServer::Answer{.body = std::string(8 << 20, 'x')}; };
    auto server = HttpServer::Start("127.0.0.1:0", std::move(pages));
    ASSERT_THAT(server, IsOk());
    server_ = *std::move(server);
  }

  int Connect() const {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(server_->port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    return fd;
  }
  static void Send(int fd, const std::string& text) {
    EXPECT_EQ(send(fd, text.data(), text.size(), MSG_NOSIGNAL), std::ssize(text));
  }
  // All that comes, and closes.
  static std::string Receive(int fd) {
    std::string text;
    char buffer[65536];
    for (ssize_t n = 0; (n = recv(fd, buffer, sizeof(buffer), 0)) > 0;) text.append(buffer, n);
    close(fd);
    return text;
  }
  std::string Ask(const std::string& request) const {
    const int fd = Connect();
    Send(fd, request);
    return Receive(fd);
  }

  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, AnswersGet) {
  EXPECT_THAT(Ask("GET /a HTTP/1.1\r\nHost: x\r\n\r\n"),
              AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("\r\nContent-Length: 5\r\n"),
                    EndsWith("\r\n\r\nof a\n")));
  EXPECT_THAT(Ask("GET /a?b=c HTTP/1.0\r\n\r\n"), EndsWith("\r\n\r\nof a\n"));
}

TEST_F(HttpServerTest, AnswersHeadWithoutABody) {
  EXPECT_THAT(Ask("HEAD /a HTTP/1.1\r\n\r\n"),
              AllOf(HasSubstr("\r\nContent-Length: 5\r\n"), EndsWith("\r\n\r\n")));
}

TEST_F(HttpServerTest, TakesARequestByteByByte) {
  const int fd = Connect();
  for (const char c : std::string("GET /a HTTP/1.1\r\nHost: x\r\n\r\n"))
    Send(fd, std::string(1, c));
  EXPECT_THAT(Receive(fd), EndsWith("of a\n"));
}

TEST_F(HttpServerTest, SendsWhatDoesNotFitAtOnce) {
  EXPECT_GT(Ask("GET /large HTTP/1.1\r\n\r\n").size(), size_t{8} << 20);
}

TEST_F(HttpServerTest, RefusesWhatIsNoRequest) {
  EXPECT_EQ(Ask("nonsense\r\n\r\n"), "");
  EXPECT_THAT(Ask("GET /a\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(Ask("GET /b HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(Ask("POST /a HTTP/1.1\r\n\r\n"),
              AllOf(StartsWith("HTTP/1.1 405 "), HasSubstr("\r\nAllow: GET, HEAD\r\n")));
  EXPECT_THAT(Ask(absl::StrCat("GET /a HTTP/1.1\r\n", std::string(9000, 'x'))),
              StartsWith("HTTP/1.1 431 "));
}

TEST_F(HttpServerTest, MoreConnectionsThanThereMayBeWaitForThoseThatAreAnswered) {
  std::vector<int> asking;
  for (int i = 0; i < HttpServer::kMaxConnections; ++i) {
    asking.push_back(Connect());
    // More than the kernel takes for a client that reads nothing.
    Send(asking.back(), "GET /large HTTP/1.1\r\n\r\n");
    char first = 0;
    ASSERT_EQ(recv(asking.back(), &first, 1, MSG_PEEK), 1);
  }
  const int waiting = Connect();
  Send(waiting, "GET /a HTTP/1.1\r\n\r\n");
  close(asking.back());
  asking.pop_back();
  EXPECT_THAT(Receive(waiting), EndsWith("of a\n"));
  for (const int fd : asking) {
    char first = 0;
    EXPECT_EQ(recv(fd, &first, 1, 0), 1);
    close(fd);
  }
}

TEST_F(HttpServerTest, AConnectionThatDoesNotEndItsRequestIsClosed) {
  auto server = HttpServer::Start("127.0.0.1:0", {}, std::chrono::seconds(1));
  ASSERT_THAT(server, IsOk());
  server_ = *std::move(server);
  const int fd = Connect();
  Send(fd, "GET /a HTTP/1.1\r\n");
  EXPECT_EQ(Receive(fd), "");
}

TEST_F(HttpServerTest, StopsWhateverClientsDo) {
  const int fd = Connect();
  Send(fd, "GET /large HTTP/1.1\r\n\r\n");
  server_.reset();
  close(fd);
}

TEST(HttpServerStartTest, TellsOfAnAddressInUse) {
  const auto first = HttpServer::Start("127.0.0.1:0", {});
  ASSERT_THAT(first, IsOk());
  EXPECT_THAT(HttpServer::Start(absl::StrCat("127.0.0.1:", (*first)->port()), {}),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("--http-listen")));
}

}  // namespace
}  // namespace ema
