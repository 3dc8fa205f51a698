// SPDX-License-Identifier: Apache-2.0
#include "server/registry/lease_observer.h"

namespace ema {

bool LeaseObserver::IsExpired(const KubernetesObject& lease) {
  absl::MutexLock lock(&mu_);
  Observation& seen = observations_[lease.entry.key];
  if (seen.revision != lease.entry.revision) {
    seen = {.revision = lease.entry.revision, .since = SteadyNow(), .ttl = lease.ttl};
  }
  return Since(seen.since) >= seen.ttl;
}

SteadyTime LeaseObserver::ExpiryOf(std::string_view key) const {
  absl::MutexLock lock(&mu_);
  const auto seen = observations_.find(key);
  return seen == observations_.end() ? SteadyTime::min()
                                     : After(seen->second.since, seen->second.ttl);
}

void LeaseObserver::Forget(std::string_view key) {
  absl::MutexLock lock(&mu_);
  const auto seen = observations_.find(key);
  if (seen != observations_.end()) observations_.erase(seen);
}

void LeaseObserver::Restart() {
  absl::MutexLock lock(&mu_);
  observations_.clear();
}

}  // namespace ema
