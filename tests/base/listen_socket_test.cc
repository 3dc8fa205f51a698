// SPDX-License-Identifier: Apache-2.0
#include "server/base/listen_socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/base/peer_network.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

TEST(ConnectionAcceptorTest, WhoIsRefusedForWantOfADescriptorIsNamed) {
  EMA_ASSERT_OK_AND_ASSIGN(const ListenSocket listening, ListenTcp("127.0.0.1:0", "--listen"));
  ConnectionAcceptor acceptor(listening.fd);
  const int client = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in server{};
  server.sin_family = AF_INET;
  server.sin_port = htons(static_cast<uint16_t>(listening.port));
  server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(connect(client, reinterpret_cast<sockaddr*>(&server), sizeof(server)), 0);
  sockaddr_in own{};
  socklen_t size = sizeof(own);
  ASSERT_EQ(getsockname(client, reinterpret_cast<sockaddr*>(&own), &size), 0);

  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit low = before;
  const int next_fd = open("/dev/null", O_RDONLY);
  close(next_fd);
  low.rlim_cur = static_cast<rlim_t>(next_fd);
  setrlimit(RLIMIT_NOFILE, &low);
  const ConnectionAcceptor::Accepted accepted = acceptor.Accept(SOCK_CLOEXEC);
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(accepted.outcome, ConnectionAcceptor::Outcome::kRefused);
  EXPECT_EQ(accepted.peer, PeerText(reinterpret_cast<const sockaddr*>(&own)));
  close(client);
  close(listening.fd);
}

}  // namespace
}  // namespace ema
