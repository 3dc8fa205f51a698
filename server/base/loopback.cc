// SPDX-License-Identifier: Apache-2.0
#include "server/base/loopback.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>

namespace ema {

bool IsLoopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    sockaddr_in v4;
    std::memcpy(&v4, address, sizeof(v4));
    return (ntohl(v4.sin_addr.s_addr) >> 24) == 127;
  }
  if (address->sa_family == AF_INET6) {
    sockaddr_in6 v6;
    std::memcpy(&v6, address, sizeof(v6));
    const bool is_mapped_v4 = IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr);
    return IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr) || (is_mapped_v4 && v6.sin6_addr.s6_addr[12] == 127);
  }
  return false;
}

}  // namespace ema
