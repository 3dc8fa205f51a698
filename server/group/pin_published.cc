// SPDX-License-Identifier: Apache-2.0
#include "server/group/pin_published.h"

#include "absl/cleanup/cleanup.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ema/error_reason.h"
#include "server/base/steady_wait.h"

namespace ema::group {
namespace {

// How long this partition may take to publish a version that the home has published.
constexpr absl::Duration kPublishTimeout = absl::Seconds(5);

}  // namespace

absl::StatusOr<SnapshotRef> PinPublished(
    Model& partition, const VersionId& id,
    absl::StatusOr<SnapshotRef> (VersionHistory::*pin)(int64_t version, int64_t incarnation)) {
  absl::Mutex mu;
  SteadyWait wait;
  int64_t commit_count = 0;
  const int64_t watcher = partition.watchers().Watch([&] {
    absl::MutexLock lock(&mu);
    ++commit_count;
    wait.WakeAll();
  });
  const absl::Cleanup unwatch = [&] { partition.watchers().Unwatch(watcher); };
  const SteadyTime deadline = After(SteadyNow(), kPublishTimeout);
  int64_t seen_count = 0;
  bool has_time = true;
  while (true) {
    absl::StatusOr<SnapshotRef> pinned = (partition.history().*pin)(id.version, id.incarnation);
    const ErrorReason reason = GetErrorReason(pinned.status());
    const bool may_come =
        reason == ErrorReason::kVersionNotYet || reason == ErrorReason::kNoVersion;
    if (!may_come || !has_time) return pinned;
    absl::MutexLock lock(&mu);
    has_time = wait.AwaitUntil(mu, deadline, [&] { return commit_count != seen_count; });
    seen_count = commit_count;
  }
}

}  // namespace ema::group
