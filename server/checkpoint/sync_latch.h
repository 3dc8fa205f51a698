// SPDX-License-Identifier: Apache-2.0
//
// Remembers the first failed fsync.
#ifndef EMA_SERVER_CHECKPOINT_SYNC_LATCH_H_
#define EMA_SERVER_CHECKPOINT_SYNC_LATCH_H_

#include <functional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ema/error_reason.h"

namespace ema {

// After a failed fsync the kernel may have dropped the data and will report success the next time
// (as PostgreSQL learned in 2018), so nothing that is written later can be called durable.
// Thread-safe; never blocks for long.
class SyncLatch {
 public:
  // `on_latch`, which may be empty, is called once, from any thread, with the message of the error.
  explicit SyncLatch(std::function<void(const std::string&)> on_latch = nullptr)
      : on_latch_(std::move(on_latch)) {}

  // Passes `sync_status` on, and latches if it is an error: the result is then UNAVAILABLE,
  // STORE_READ_ONLY. Three errors do not latch. RESOURCE_EXHAUSTED: on a full disk the unsynced
  // data are still temporary, and are removed; without a free descriptor, no sync was tried.
  // NOT_FOUND and PERMISSION_DENIED: nothing could be opened.
  absl::Status Check(const absl::Status& sync_status) ABSL_LOCKS_EXCLUDED(mu_) {
    if (sync_status.ok() || absl::IsResourceExhausted(sync_status) ||
        absl::IsNotFound(sync_status) || absl::IsPermissionDenied(sync_status)) {
      return sync_status;
    }
    {
      absl::MutexLock lock(&mu_);
      if (!latched_.ok()) return latched_;
      latched_ = MakeError(absl::StatusCode::kUnavailable, ErrorReason::kStoreReadOnly,
                           absl::StrCat("the checkpoint store is read-only until the server is "
                                        "started again: ",
                                        sync_status.message()));
    }
    if (on_latch_) on_latch_(std::string(status().message()));
    return status();
  }

  // OK, or the error that has latched.
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return latched_;
  }

 private:
  const std::function<void(const std::string&)> on_latch_;
  mutable absl::Mutex mu_;
  absl::Status latched_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_SYNC_LATCH_H_
