// SPDX-License-Identifier: Apache-2.0
//
// Connections of our own making, which gRPC then speaks over.
#ifndef EMA_CLIENT_CPP_TRANSPORT_DIAL_H_
#define EMA_CLIENT_CPP_TRANSPORT_DIAL_H_

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "client/cpp/transport/interrupt.h"
#include "server/base/steady_wait.h"

struct addrinfo;

namespace ema::client_internal {

struct Address {
  std::string host = {};
  std::string port = {};
  std::string path = {};  // Of a unix socket; then the others are empty.
  bool is_tls = false;

  // Reads what Client::Create() takes. INVALID_ARGUMENT, BAD_REQUEST: anything else.
  static absl::StatusOr<Address> Parse(std::string_view text);
  std::string ToString() const;
  // "host:port", as a URL has it. REQUIRES: of no unix socket.
  std::string Authority() const;
};

// Makes connections to one address. For one thread at a time.
class Dialer {
 public:
  explicit Dialer(Address address) : address_(std::move(address)) {}

  const Address& address() const { return address_; }

  // A connected socket: of TCP with Nagle's algorithm off, and the congestion control changed to
  // reno if the peer is on this machine: bbr, the default of some systems, paces loopback to two
  // thirds of its speed. The caller owns it. UNAVAILABLE: no such host, or nobody there.
  // DEADLINE_EXCEEDED. CANCELLED: `interrupt` was fired.
  absl::StatusOr<int> Dial(SteadyTime deadline, Interrupt* interrupt);

 private:
  // Looks the host up each time, because a server that was restarted may be elsewhere. While the
  // name service does not answer, what it said last counts.
  absl::Status Find(SteadyTime deadline, Interrupt* interrupt);
  absl::StatusOr<int> DialUnix() const;

  const Address address_;
  std::shared_ptr<const addrinfo> found_;  // Null: not found yet.
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_DIAL_H_
