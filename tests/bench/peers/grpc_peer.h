// SPDX-License-Identifier: Apache-2.0
//
// The peer that shows what the raw path is worth: gRPC as its tutorial has it, with protobuf
// messages that hold `bytes`, and the synchronous API on both sides; the same checksums, fold and
// congestion control as ours.
#ifndef EMA_TESTS_BENCH_PEERS_GRPC_PEER_H_
#define EMA_TESTS_BENCH_PEERS_GRPC_PEER_H_

#include <cstddef>
#include <memory>
#include <span>

#include "peers/grpc_peer.grpc.pb.h"
#include "tests/bench/child_process.h"

namespace ema::bench {

class GrpcPeer {
 public:
  // Of weights of `total` bytes of float32.
  explicit GrpcPeer(size_t total);

  void Push(std::span<const std::byte> weights);

  pid_t pid() const { return process_.pid(); }

 private:
  ChildProcess process_;
  const std::unique_ptr<WeightService::Stub> stub_;
};

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_PEERS_GRPC_PEER_H_
