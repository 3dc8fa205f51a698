// SPDX-License-Identifier: Apache-2.0
//
// Opens sockets on which gRPC then runs.
#ifndef EMA_CLIENT_CPP_TRANSPORT_DIAL_H_
#define EMA_CLIENT_CPP_TRANSPORT_DIAL_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/transport/interrupt.h"
#include "server/base/steady_wait.h"

struct addrinfo;

namespace ema::client_internal {

struct Address {
  std::string host = {};
  std::string port = {};
  std::string path = {};  // Path of a unix socket; then the others are empty.
  bool is_tls = false;

  // Parses an address of Client::Create(). INVALID_ARGUMENT, BAD_REQUEST: another form.
  static absl::StatusOr<Address> Parse(std::string_view text);
  // The same for a list "ema://host:port,host:port" of servers of one group; the prefix counts for
  // all of them. Without a comma, and for a unix socket: one address.
  static absl::StatusOr<std::vector<Address>> ParseList(std::string_view text);
  std::string ToString() const;
  // "host:port", as in a URL. REQUIRES: not a unix socket.
  std::string Authority() const;
};

// Makes connections to one address. For one thread at a time.
class Dialer {
 public:
  explicit Dialer(Address address) : address_(std::move(address)) {}

  const Address& address() const { return address_; }

  // Returns a connected socket, which the caller owns. A TCP socket has Nagle's algorithm off and,
  // if the peer is on this machine, reno as congestion control: bbr, the default of some systems,
  // paces loopback to two thirds of its speed. UNAVAILABLE: no such host, or no server there.
  // DEADLINE_EXCEEDED. CANCELLED: `interrupt` was fired.
  absl::StatusOr<int> Dial(SteadyTime deadline, Interrupt* interrupt);

 private:
  // Looks the host up each time, because a restarted server may have moved. While the name service
  // does not answer, uses its last answer.
  absl::Status Find(SteadyTime deadline, Interrupt* interrupt);
  absl::StatusOr<int> DialUnix() const;

  const Address address_;
  std::shared_ptr<const addrinfo> found_;  // Null: not found yet.
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_DIAL_H_
