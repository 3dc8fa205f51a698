// SPDX-License-Identifier: Apache-2.0
#include "tests/testutil/free_ports.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace ema {

std::vector<int> FindFreePorts(int count) {
  std::vector<int> sockets;
  std::vector<int> ports;
  for (int i = 0; i < count; ++i) {
    sockets.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    bind(sockets.back(), reinterpret_cast<sockaddr*>(&address), size);
    getsockname(sockets.back(), reinterpret_cast<sockaddr*>(&address), &size);
    ports.push_back(ntohs(address.sin_port));
  }
  // All have been found, so they differ.
  for (const int fd : sockets) close(fd);
  return ports;
}

}  // namespace ema
