// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_SERVER_REGISTRY_LEASE_OBSERVER_H_
#define EMA_SERVER_REGISTRY_LEASE_OBSERVER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"
#include "server/registry/kubernetes_objects.h"

namespace ema {

// Decides which leases have expired, as Kubernetes does not: those that this process has seen
// unchanged for their duration, by its own steady clock. The times in a lease do not count, since
// they come from clocks of other hosts. Thread-safe.
class LeaseObserver {
 public:
  // Notes the lease as it was just read. True: it has expired.
  bool IsExpired(const KubernetesObject& lease) ABSL_LOCKS_EXCLUDED(mu_);
  // When the lease, as it was read last, expires. SteadyTime::min(): it must be read.
  SteadyTime ExpiryOf(std::string_view key) const ABSL_LOCKS_EXCLUDED(mu_);
  // The lease has been deleted.
  void Forget(std::string_view key) ABSL_LOCKS_EXCLUDED(mu_);
  // Contact was lost, so members may have failed to renew their leases: each of them gets its
  // duration again.
  void Restart() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Observation {
    int64_t revision = 0;
    SteadyTime since;
    absl::Duration ttl;
  };

  mutable absl::Mutex mu_;
  std::map<std::string, Observation, std::less<>> observations_ ABSL_GUARDED_BY(mu_);  // By key.
};

}  // namespace ema

#endif  // EMA_SERVER_REGISTRY_LEASE_OBSERVER_H_
