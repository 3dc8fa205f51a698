// SPDX-License-Identifier: Apache-2.0
#include "server/base/socket_address.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <string>

namespace ema {
namespace {

TEST(SocketAddressTest, PeersAreNamedByAddressAndPort) {
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(4711);
  ASSERT_EQ(inet_pton(AF_INET, "10.0.0.1", &v4.sin_addr), 1);
  EXPECT_EQ(PeerText(reinterpret_cast<const sockaddr*>(&v4)), "10.0.0.1:4711");
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(4711);
  ASSERT_EQ(inet_pton(AF_INET6, "2001:db8:0:1::7", &v6.sin6_addr), 1);
  EXPECT_EQ(PeerText(reinterpret_cast<const sockaddr*>(&v6)), "[2001:db8:0:1::7]:4711");
  sockaddr unix_address{};
  unix_address.sa_family = AF_UNIX;
  EXPECT_EQ(PeerText(&unix_address), "");
}

bool IsLoopbackText(const std::string& text) {
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  if (inet_pton(AF_INET, text.c_str(), &v4.sin_addr) == 1) {
    return IsLoopback(reinterpret_cast<const sockaddr*>(&v4));
  }
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  EXPECT_EQ(inet_pton(AF_INET6, text.c_str(), &v6.sin6_addr), 1) << text;
  return IsLoopback(reinterpret_cast<const sockaddr*>(&v6));
}

TEST(SocketAddressTest, LoopbackIsOfBothFamiliesAndMapped) {
  for (const char* const text : {"127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"}) {
    EXPECT_TRUE(IsLoopbackText(text)) << text;
  }
  for (const char* const text : {"10.0.0.1", "128.0.0.1", "::", "::2", "::ffff:10.0.0.1"}) {
    EXPECT_FALSE(IsLoopbackText(text)) << text;
  }
  sockaddr other{};
  other.sa_family = AF_UNIX;
  EXPECT_FALSE(IsLoopback(&other));
}

}  // namespace
}  // namespace ema
