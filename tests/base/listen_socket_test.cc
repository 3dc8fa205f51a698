// SPDX-License-Identifier: Apache-2.0
#include "server/base/listen_socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <string>

#include "server/base/socket_address.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

// A listener, and a client that has connected to it.
class ConnectionAcceptorTest : public testing::Test {
 protected:
  void SetUp() override {
    // A quarter of the descriptors is more than what is reserved.
    for (int& fd : others_) fd = open("/dev/null", O_RDONLY);
    EMA_ASSERT_OK_AND_ASSIGN(listening_, ListenTcp("127.0.0.1:0", "--listen"));
    sockaddr_in server{};
    server.sin_family = AF_INET;
    server.sin_port = htons(static_cast<uint16_t>(listening_.port));
    server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(connect(client_, reinterpret_cast<sockaddr*>(&server), sizeof(server)), 0);
    sockaddr_in own{};
    socklen_t size = sizeof(own);
    ASSERT_EQ(getsockname(client_, reinterpret_cast<sockaddr*>(&own), &size), 0);
    client_name_ = PeerText(reinterpret_cast<const sockaddr*>(&own));
  }
  void TearDown() override {
    for (const int fd : others_) close(fd);
    close(client_);
    close(listening_.fd);
  }

  // Where the process may have so many descriptors more than it has.
  static ConnectionAcceptor::Accepted AcceptWith(ConnectionAcceptor& acceptor, rlim_t free_count) {
    rlimit before{};
    getrlimit(RLIMIT_NOFILE, &before);
    rlimit low = before;
    const int next_fd = open("/dev/null", O_RDONLY);
    close(next_fd);
    low.rlim_cur = static_cast<rlim_t>(next_fd) + free_count;
    setrlimit(RLIMIT_NOFILE, &low);
    ConnectionAcceptor::Accepted accepted = acceptor.Accept(SOCK_CLOEXEC);
    setrlimit(RLIMIT_NOFILE, &before);
    return accepted;
  }

  const int client_ = socket(AF_INET, SOCK_STREAM, 0);
  std::array<int, 16> others_{};
  ListenSocket listening_;
  std::string client_name_;
};

TEST_F(ConnectionAcceptorTest, WhoIsRefusedForWantOfADescriptorIsNamed) {
  ConnectionAcceptor acceptor(listening_.fd);
  const ConnectionAcceptor::Accepted accepted = AcceptWith(acceptor, 0);
  EXPECT_EQ(accepted.outcome, ConnectionAcceptor::Outcome::kRefused);
  EXPECT_EQ(accepted.peer, client_name_);
}

TEST_F(ConnectionAcceptorTest, TheLastDescriptorsAreNotForConnections) {
  ConnectionAcceptor acceptor(listening_.fd, /*reserved_files=*/3);
  const ConnectionAcceptor::Accepted refused = AcceptWith(acceptor, 3);
  EXPECT_EQ(refused.outcome, ConnectionAcceptor::Outcome::kRefused);
  EXPECT_EQ(refused.peer, client_name_);
  char byte = 0;
  EXPECT_EQ(read(client_, &byte, 1), 0) << "the connection is still open";
}

TEST_F(ConnectionAcceptorTest, ADescriptorBeforeTheLastIsForAConnection) {
  ConnectionAcceptor acceptor(listening_.fd, /*reserved_files=*/3);
  const ConnectionAcceptor::Accepted accepted = AcceptWith(acceptor, 4);
  EXPECT_EQ(accepted.outcome, ConnectionAcceptor::Outcome::kAccepted);
  close(accepted.fd);
}

}  // namespace
}  // namespace ema
