// SPDX-License-Identifier: Apache-2.0
#include "server/base/socket_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <cstring>

#include "absl/strings/str_cat.h"

namespace ema {
namespace {

std::string TextOf(int family, const void* address) {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(family, address, text, sizeof(text));
  return text;
}

}  // namespace

std::string PeerText(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    sockaddr_in v4;
    std::memcpy(&v4, address, sizeof(v4));
    return absl::StrCat(TextOf(AF_INET, &v4.sin_addr), ":", ntohs(v4.sin_port));
  }
  if (address->sa_family == AF_INET6) {
    sockaddr_in6 v6;
    std::memcpy(&v6, address, sizeof(v6));
    return absl::StrCat("[", TextOf(AF_INET6, &v6.sin6_addr), "]:", ntohs(v6.sin6_port));
  }
  return "";
}

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
