// SPDX-License-Identifier: Apache-2.0
#include "server/base/peer_network.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace ema {
namespace {

std::string TextOf(int family, const void* address) {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(family, address, text, sizeof(text));
  return text;
}

std::string NetworkOf(in6_addr address) {
  if (IN6_IS_ADDR_V4MAPPED(&address)) return TextOf(AF_INET, &address.s6_addr[12]);
  if (IN6_IS_ADDR_LINKLOCAL(&address)) return TextOf(AF_INET6, &address);
  std::fill(std::begin(address.s6_addr) + 8, std::end(address.s6_addr), uint8_t{0});
  return absl::StrCat(TextOf(AF_INET6, &address), "/64");
}

}  // namespace

std::string NetworkOf(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    sockaddr_in v4;
    std::memcpy(&v4, address, sizeof(v4));
    return TextOf(AF_INET, &v4.sin_addr);
  }
  if (address->sa_family == AF_INET6) {
    sockaddr_in6 v6;
    std::memcpy(&v6, address, sizeof(v6));
    return NetworkOf(v6.sin6_addr);
  }
  return "";
}

std::string NetworkOfPeer(std::string_view peer) {
  constexpr std::string_view kV4 = "ipv4:";
  constexpr std::string_view kV6 = "ipv6:";
  if (peer.starts_with(kV4))
    return std::string(peer.substr(kV4.size(), peer.rfind(':') - kV4.size()));
  if (peer.starts_with(kV6)) {
    const std::string text = absl::StrReplaceAll(std::string(peer.substr(kV6.size())),
                                                 {{"%5B", "["}, {"%5D", "]"}, {"%25", "%"}});
    // "[address%zone]:port".
    const size_t end = text.find_first_of("%]");
    in6_addr address;
    if (text.starts_with('[') && end != std::string::npos &&
        inet_pton(AF_INET6, text.substr(1, end - 1).c_str(), &address) == 1) {
      return NetworkOf(address);
    }
  }
  return std::string(peer);
}

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
