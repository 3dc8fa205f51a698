// SPDX-License-Identifier: Apache-2.0
#include "tests/testutil/free_ports.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <random>

namespace ema {

std::vector<int> FindFreePorts(int count) {
  // The ports from 32768 on are those of outgoing connections: one could get the port meanwhile.
  std::random_device random;
  std::uniform_int_distribution<int> any_port(10'000, 32'767);
  std::vector<int> sockets;
  std::vector<int> ports;
  while (static_cast<int>(ports.size()) < count) {
    const int port = any_port(random);
    sockets.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    const auto* const name = reinterpret_cast<const sockaddr*>(&address);
    if (bind(sockets.back(), name, sizeof(address)) == 0) ports.push_back(port);
  }
  // A port that is still bound cannot be chosen twice.
  for (const int fd : sockets) close(fd);
  return ports;
}

}  // namespace ema
