// SPDX-License-Identifier: Apache-2.0
//
// The other ends of the peers that are C++ programs: `peer_server socket BYTES` and
// `peer_server grpc BYTES` print the port that they listen on, and end when their client has gone.
#ifndef EMA_TESTS_BENCH_PEERS_PEER_SERVER_H_
#define EMA_TESTS_BENCH_PEERS_PEER_SERVER_H_

#include <cstddef>
#include <string>
#include <utility>

#include "tests/bench/bench_util.h"

namespace ema::bench {

// The program, which lies beside this one.
std::string PeerServerPath();

// What a peer averages into: as our server, it builds the next average beside the current one.
class PeerAverage {
 public:
  explicit PeerAverage(size_t total) : current_(total), next_(total) {}

  // Folds float32 values that lie at `offset` of the whole.
  void Fold(size_t offset, const std::byte* data, size_t size);
  void Commit() { is_swapped_ = !is_swapped_; }
  const std::byte* data() const { return current().data(); }
  size_t size() const { return current_.size(); }

 private:
  const Arena& current() const { return is_swapped_ ? next_ : current_; }
  const Arena& next() const { return is_swapped_ ? current_ : next_; }

  const Arena current_;
  const Arena next_;
  bool is_swapped_ = false;
};

void ServeSocket(size_t total);
void ServeGrpc(size_t total);

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_PEERS_PEER_SERVER_H_
