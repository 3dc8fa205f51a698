// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_SERVER_BASE_LOOPBACK_H_
#define EMA_SERVER_BASE_LOOPBACK_H_

struct sockaddr;

namespace ema {

// True for 127.0.0.0/8, ::1, and the former as an IPv6 address.
bool IsLoopback(const sockaddr* address);

}  // namespace ema

#endif  // EMA_SERVER_BASE_LOOPBACK_H_
