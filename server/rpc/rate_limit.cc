// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/rate_limit.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ema/error_reason.h"
#include "server/base/peer_network.h"

namespace ema {
namespace {

// Above so many, peers that have been silent for a second are forgotten.
constexpr size_t kManyPeers = 1024;

}  // namespace

double RateLimit::CallsAt(const Bucket& bucket, Time now) const {
  const std::chrono::duration<double> passed = now - bucket.since;
  return std::min<double>(static_cast<double>(calls_per_second_),
                          bucket.calls + passed.count() * static_cast<double>(calls_per_second_));
}

absl::Status RateLimit::Take(std::string_view peer, Time now) {
  if (calls_per_second_ == 0) return absl::OkStatus();
  const std::string network = NetworkOfPeer(peer);
  absl::MutexLock lock(&mu_);
  if (buckets_.size() >= kManyPeers && !buckets_.contains(network)) DropFullLocked(now);
  Bucket& bucket =
      buckets_.try_emplace(network, Bucket{static_cast<double>(calls_per_second_), now})
          .first->second;
  bucket = {CallsAt(bucket, now), now};
  if (bucket.calls >= 1) {
    bucket.calls -= 1;
    return absl::OkStatus();
  }
  return MakeError(
      absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyCalls,
      absl::StrCat("more than ", calls_per_second_, " calls a second from this address"),
      absl::Seconds((1 - bucket.calls) / static_cast<double>(calls_per_second_)) +
          absl::Milliseconds(1));
}

void RateLimit::DropFullLocked(Time now) {
  absl::erase_if(buckets_, [&](const auto& entry) {
    return CallsAt(entry.second, now) >= static_cast<double>(calls_per_second_);
  });
}

size_t RateLimit::peer_count() const {
  absl::MutexLock lock(&mu_);
  return buckets_.size();
}

}  // namespace ema
