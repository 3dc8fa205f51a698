// SPDX-License-Identifier: Apache-2.0
//
// Properties of the addresses of peers.
#ifndef EMA_SERVER_BASE_SOCKET_ADDRESS_H_
#define EMA_SERVER_BASE_SOCKET_ADDRESS_H_

#include <sys/socket.h>

#include <string>

namespace ema {

// "10.0.0.1:4711". Empty if it is not an IP address.
std::string PeerText(const sockaddr* address);

// True for 127.0.0.0/8, also as an IPv6 address, and for ::1.
bool IsLoopback(const sockaddr* address);

}  // namespace ema

#endif  // EMA_SERVER_BASE_SOCKET_ADDRESS_H_
