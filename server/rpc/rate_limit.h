// SPDX-License-Identifier: Apache-2.0
//
// How many calls a peer may make.
#ifndef EMA_SERVER_RPC_RATE_LIMIT_H_
#define EMA_SERVER_RPC_RATE_LIMIT_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace ema {

// Lets each peer make so many calls a second, and after a pause as many at once (a token bucket of
// one second). Thread-safe.
class RateLimit {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // 0: no limit.
  explicit RateLimit(int64_t calls_per_second) : calls_per_second_(calls_per_second) {}

  // One more call. `peer` is as gRPC names it, such as "ipv4:10.0.0.1:4711": those of one
  // network (see NetworkOfPeer()) count together. RESOURCE_EXHAUSTED, TOO_MANY_CALLS, with when to
  // try again; the call does not count then.
  absl::Status Take(std::string_view peer, Time now) ABSL_LOCKS_EXCLUDED(mu_);
  // Peers that are remembered.
  size_t peer_count() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // Calls that the peer may make at `since`; they grow with time.
  struct Bucket {
    double calls = 0;
    Time since;
  };

  double CallsAt(const Bucket& bucket, Time now) const;
  void DropFullLocked(Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int64_t calls_per_second_;
  mutable absl::Mutex mu_;
  absl::flat_hash_map<std::string, Bucket> buckets_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_RATE_LIMIT_H_
