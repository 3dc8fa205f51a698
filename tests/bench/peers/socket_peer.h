// SPDX-License-Identifier: Apache-2.0
//
// The peer of pushes and pulls: a process behind a plain, blocking TCP socket, with the same
// checksums, the same fold and the same congestion control as ours.
#ifndef EMA_TESTS_BENCH_PEERS_SOCKET_PEER_H_
#define EMA_TESTS_BENCH_PEERS_SOCKET_PEER_H_

#include <cstddef>

#include "tests/bench/child_process.h"
#include "tests/bench/peers/socket_wire.h"

namespace ema::bench {

class SocketPeer {
 public:
  // Of weights of `total` bytes of float32.
  explicit SocketPeer(size_t total);
  ~SocketPeer();
  SocketPeer(const SocketPeer&) = delete;
  SocketPeer& operator=(const SocketPeer&) = delete;

  // kPush, kPushUnchecked: sends the weights; the peer folds each piece, and answers when it has
  // all.
  void Push(const std::byte* weights, Command command) const;
  // kPull, kPullBfloat16: receives the average in place.
  void Pull(std::byte* weights, Command command) const;

  pid_t pid() const { return process_.pid(); }

 private:
  const size_t total_;
  ChildProcess process_;
  int fd_ = -1;
};

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_PEERS_SOCKET_PEER_H_
