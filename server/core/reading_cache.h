// SPDX-License-Identifier: Apache-2.0
//
// The open readings of a model, shared by all readers of the same bytes.
#ifndef EMA_SERVER_CORE_READING_CACHE_H_
#define EMA_SERVER_CORE_READING_CACHE_H_

#include <memory>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "ema/manifest.h"
#include "ema/selection.h"
#include "ema/version_id.h"
#include "server/core/memory_budget.h"
#include "server/core/reading.h"
#include "server/core/snapshot.h"
#include "server/device/device.h"

namespace ema {

// Invariant: while a reading is held, whoever opens the same selection of the same track and
// version gets the same object, so that its casts and copies are made once. The cache itself holds
// no reading. Thread-safe.
class ReadingCache {
 public:
  // All three outlive the cache and every snapshot that it is given.
  ReadingCache(const Manifest* manifest, Device* device, MemoryBudget* budget)
      : manifest_(manifest), device_(device), budget_(budget) {}

  // `track` is one of `snapshot`'s. Errors as Reading::Create().
  absl::StatusOr<std::shared_ptr<Reading>> Open(SnapshotRef snapshot, const TrackSnapshot& track,
                                                const Selection& selection)
      ABSL_LOCKS_EXCLUDED(mu_);
  // A held reading of a version on the disk; null: there is none. Never blocks.
  std::shared_ptr<Reading> FindStored(const VersionId& id, std::string_view track,
                                      const Selection& selection) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // Returns a held reading of `selection` that `matches`. If there is none, returns `made`, which
  // may be null, and remembers it.
  std::shared_ptr<Reading> Find(const Selection& selection,
                                absl::FunctionRef<bool(const Reading&)> matches,
                                const std::shared_ptr<Reading>& made = nullptr)
      ABSL_LOCKS_EXCLUDED(mu_);

  const Manifest* const manifest_;
  Device* const device_;
  MemoryBudget* const budget_;
  absl::Mutex mu_;
  std::vector<std::weak_ptr<Reading>> readings_ ABSL_GUARDED_BY(mu_);  // Some have expired.
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_READING_CACHE_H_
