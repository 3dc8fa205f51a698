// SPDX-License-Identifier: Apache-2.0
//
// What of a peer's address limits count by, and whether it is this machine.
#ifndef EMA_SERVER_BASE_PEER_NETWORK_H_
#define EMA_SERVER_BASE_PEER_NETWORK_H_

#include <sys/socket.h>

#include <string>
#include <string_view>

namespace ema {

// The IPv4 address, also of one that IPv6 carries; of IPv6 the first 64 bits, as
// "2001:db8:0:1::/64": whoever has one address of such a network has them all. A link-local one
// whole, for all hosts of a link share those bits. "": it is neither.
std::string NetworkOf(const sockaddr* address);

// The same of a peer as gRPC names it, such as "ipv4:10.0.0.1:4711" or "ipv6:%5B::1%5D:4711". What
// it names otherwise stays as it is.
std::string NetworkOfPeer(std::string_view peer);

// "10.0.0.1:4711"; "": it is no IP address.
std::string PeerText(const sockaddr* address);

// True for 127.0.0.0/8, ::1, and the former as an IPv6 address.
bool IsLoopback(const sockaddr* address);

}  // namespace ema

#endif  // EMA_SERVER_BASE_PEER_NETWORK_H_
