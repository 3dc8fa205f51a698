// SPDX-License-Identifier: Apache-2.0
//
// A TCP socket that listens.
#ifndef EMA_SERVER_BASE_LISTEN_SOCKET_H_
#define EMA_SERVER_BASE_LISTEN_SOCKET_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace ema {

struct ListenSocket {
  int fd = -1;  // The caller's: not blocking, closed in programs that are run.
  int port = 0;
  std::string text;  // Address and port, as in a URL.
};

// Listens on "host:port", with an IP address ("[...]" around IPv6) or a name; port 0: any free one.
// `option` is what the messages of errors call it. INVALID_ARGUMENT: not of that form.
// ALREADY_EXISTS: somebody listens there. NOT_FOUND: no such host. INTERNAL: the system refuses.
absl::StatusOr<ListenSocket> ListenTcp(const std::string& address, std::string_view option);

}  // namespace ema

#endif  // EMA_SERVER_BASE_LISTEN_SOCKET_H_
