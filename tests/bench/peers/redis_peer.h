// SPDX-License-Identifier: Apache-2.0
//
// A real Redis on loopback that stores weights, one value for each tensor, without averaging them.
#ifndef EMA_TESTS_BENCH_PEERS_REDIS_PEER_H_
#define EMA_TESTS_BENCH_PEERS_REDIS_PEER_H_

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace ema::bench {

class RedisPeer {
 public:
  virtual ~RedisPeer() = default;
  virtual void Set(const std::vector<std::span<const std::byte>>& tensors) = 0;
  // Copies each value to where its tensor is. REQUIRES: Set() of tensors of the same sizes.
  virtual void Get(const std::vector<std::span<std::byte>>& tensors) = 0;
  virtual pid_t pid() const = 0;
};

// Null: redis-server is not installed, or this was built without hiredis.
std::unique_ptr<RedisPeer> StartRedis();

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_PEERS_REDIS_PEER_H_
