// SPDX-License-Identifier: Apache-2.0
#include "server/registry/renewal_thread.h"

#include <algorithm>
#include <utility>

namespace ema {
namespace {

constexpr absl::Duration kRetryInterval = absl::Milliseconds(500);

}  // namespace

RenewalThread::RenewalThread(std::string key, absl::Duration ttl, LogSink log,
                             std::function<absl::StatusOr<Renewal>()> renew)
    : key_(std::move(key)),
      log_(std::move(log)),
      renew_(std::move(renew)),
      thread_(&RenewalThread::Run, this, ttl) {}

void RenewalThread::Stop() {
  {
    absl::MutexLock lock(&mu_);
    is_stopped_ = true;
    stop_wait_.WakeAll();
  }
  if (thread_.joinable()) thread_.join();
}

absl::Status RenewalThread::status() const {
  absl::MutexLock lock(&mu_);
  return status_;
}

void RenewalThread::Run(absl::Duration ttl) {
  bool was_ok = true;
  while (true) {
    {
      absl::MutexLock lock(&mu_);
      const absl::Duration pause = was_ok ? ttl / 3 : std::min(ttl / 3, kRetryInterval);
      const auto is_stopped = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return is_stopped_; };
      if (stop_wait_.AwaitUntil(mu_, After(SteadyNow(), pause), is_stopped)) return;
    }
    const absl::StatusOr<Renewal> renewal = renew_();
    if (renewal.ok()) {
      ttl = renewal->ttl;
      if (!was_ok || renewal->is_new_lease) {
        LogTo(log_, LogLevel::kInfo, "registry membership regained",
              {{"key", key_}, {"is_new_lease", renewal->is_new_lease}});
      }
    } else if (was_ok) {
      LogTo(log_, LogLevel::kWarning, "registry membership not renewed",
            {{"key", key_}, {"ttl", ttl}, {"error", renewal.status()}});
    }
    was_ok = renewal.ok();
    absl::MutexLock lock(&mu_);
    status_ = renewal.status();
  }
}

}  // namespace ema
