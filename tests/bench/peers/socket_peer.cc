// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/peers/socket_peer.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "tests/bench/bench_util.h"
#include "tests/bench/peers/peer_server.h"

namespace ema::bench {

SocketPeer::SocketPeer(size_t total)
    : total_(total),
      process_({PeerServerPath(), "socket", absl::StrCat(total)}, ChildProcess::Stop::kEndOfInput),
      fd_(ConnectOnLoopback(std::stoi(process_.ReadLine()))) {}

// The process ends with its connection.
SocketPeer::~SocketPeer() { close(fd_); }

void SocketPeer::Push(const std::byte* weights, Command command) const {
  WriteAll(fd_, reinterpret_cast<const std::byte*>(&command), sizeof(command));
  ForEachPiece(total_, [&](size_t offset, size_t size) {
    SendPiece(fd_, weights + offset, size, command == Command::kPush);
  });
  std::byte done{};
  if (!ReadAll(fd_, &done, 1)) Die("the socket peer has gone");
}

void SocketPeer::Pull(std::byte* weights, Command command) const {
  WriteAll(fd_, reinterpret_cast<const std::byte*>(&command), sizeof(command));
  ForEachPiece(command == Command::kPull ? total_ : total_ / 2, [&](size_t offset, size_t size) {
    if (!ReceivePiece(fd_, weights + offset, size, /*is_checked=*/true)) {
      Die("the socket peer has gone");
    }
  });
}

}  // namespace ema::bench
