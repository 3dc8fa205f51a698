// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_SERVER_REGISTRY_RENEWAL_THREAD_H_
#define EMA_SERVER_REGISTRY_RENEWAL_THREAD_H_

#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/log_event.h"
#include "server/base/steady_wait.h"

namespace ema {

// Renews the key of a member three times in its TTL, and sooner after a failure. Logs lost and
// regained memberships. Thread-safe.
class RenewalThread {
 public:
  struct Renewal {
    absl::Duration ttl;
    bool is_new_lease = false;  // The old one had expired, so the key was put again.
  };

  // `renew` is called on the thread. `ttl` is that of the key, which has just been put.
  RenewalThread(std::string key, absl::Duration ttl, LogSink log,
                std::function<absl::StatusOr<Renewal>()> renew);
  ~RenewalThread() { Stop(); }

  // Waits for a running renewal. No other one begins.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);
  // The result of the last renewal.
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Run(absl::Duration ttl) ABSL_LOCKS_EXCLUDED(mu_);

  const std::string key_;
  const LogSink log_;
  const std::function<absl::StatusOr<Renewal>()> renew_;

  mutable absl::Mutex mu_;
  SteadyWait stop_wait_;
  bool is_stopped_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mu_);

  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_SERVER_REGISTRY_RENEWAL_THREAD_H_
