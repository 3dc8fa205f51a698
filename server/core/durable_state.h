// SPDX-License-Identifier: Apache-2.0
//
// The newest state of a model on the disk.
#ifndef EMA_SERVER_CORE_DURABLE_STATE_H_
#define EMA_SERVER_CORE_DURABLE_STATE_H_

#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ema/time.h"
#include "ema/version.h"
#include "ema/version_id.h"

namespace ema {

// Invariant: the durable version never goes back, and the durable step is never beyond the step
// that the last rollback has returned to, unless a version of the new branch is durable.
// Thread-safe; no other lock is taken under its own.
class DurableState {
 public:
  // The newest version on the disk and its step; all zero: none.
  struct Saved {
    VersionId version;
    int64_t step = 0;
  };
  Saved saved() const ABSL_LOCKS_EXCLUDED(mu_);
  VersionId version() const { return saved().version; }
  int64_t step() const { return saved().step; }
  // Notes that version `id` is on the disk with the settings of that revision; nullopt: with the
  // settings noted for it before, or older ones. Ignores a version before version().
  void SetVersion(const VersionId& id, int64_t step, std::optional<int64_t> settings_revision)
      ABSL_LOCKS_EXCLUDED(mu_);
  // True: `id` is version(), but on the disk it has other settings than those of that revision.
  bool HasOtherSettings(const VersionId& id, int64_t settings_revision) const
      ABSL_LOCKS_EXCLUDED(mu_);

  // Training time of the newest version that is kept for the tracks' snapshot_interval; nullopt:
  // none is kept.
  std::optional<TrainingTime> kept_time() const ABSL_LOCKS_EXCLUDED(mu_);
  void SetKeptTime(const TrainingTime& time) ABSL_LOCKS_EXCLUDED(mu_);

  // A rollback has made the version of `record`: steps on the disk after its step, and kept times
  // after its time, do not belong to the current branch any more.
  void RollBackTo(const Version& record) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  mutable absl::Mutex mu_;
  Saved saved_ ABSL_GUARDED_BY(mu_);
  int64_t settings_revision_ ABSL_GUARDED_BY(mu_) = 0;  // -1: older than any that is known.
  std::optional<TrainingTime> kept_time_ ABSL_GUARDED_BY(mu_);
  // The version and step of the last rollback.
  VersionId rollback_version_ ABSL_GUARDED_BY(mu_);
  int64_t rollback_step_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_DURABLE_STATE_H_
