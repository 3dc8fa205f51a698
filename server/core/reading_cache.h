// SPDX-License-Identifier: Apache-2.0
//
// Opens versions for readers, who share the readings of the same bytes.
#ifndef EMA_SERVER_CORE_READING_CACHE_H_
#define EMA_SERVER_CORE_READING_CACHE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "ema/manifest.h"
#include "ema/selection.h"
#include "ema/version.h"
#include "ema/version_id.h"
#include "server/core/memory_budget.h"
#include "server/core/reading.h"
#include "server/core/snapshot.h"
#include "server/core/track_table.h"
#include "server/core/version_history.h"
#include "server/device/device.h"

namespace ema {

// Invariant: while a reading is held, every reader that opens the same selection of the same track
// and version gets the same object, so that its casts and copies are made once. The cache itself
// holds no reading; each one keeps the model alive. Thread-safe.
class ReadingCache {
 public:
  // All outlive the cache; `keep_alive` returns their owner.
  ReadingCache(VersionHistory* history, TrackTable* tracks, const Manifest* manifest,
               Device* device, MemoryBudget* budget, KeepAlive keep_alive)
      : history_(history),
        tracks_(tracks),
        manifest_(manifest),
        device_(device),
        budget_(budget),
        keep_alive_(std::move(keep_alive)) {}

  // Opens one track, or a synthesized average: pins its version as VersionHistory::Pin() does while
  // the result is held. NOT_FOUND, TRACK_NOT_FOUND. FAILED_PRECONDITION, NO_VERSION: the track has
  // no value in that version, either. INVALID_ARGUMENT: as Reading::Create(). Other errors as
  // VersionHistory::Pin(); of these, VERSION_NOT_KEPT comes before TRACK_NOT_FOUND: a version on
  // the disk may have the track.
  absl::StatusOr<std::shared_ptr<Reading>> Open(std::string_view track, int64_t version,
                                                int64_t incarnation, const Selection& selection)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Opens a version on the disk: its one track has TrackSnapshot::stored. Pins nothing.
  // INVALID_ARGUMENT: as Reading::Create(). Or the status given to Model::Close().
  absl::StatusOr<std::shared_ptr<Reading>> OpenStored(SnapshotRef snapshot,
                                                      const Selection& selection)
      ABSL_LOCKS_EXCLUDED(mu_);
  // A held result of OpenStored(), so that the version need not be opened again; null: there is
  // none, or the model is closed. Never blocks.
  std::shared_ptr<Reading> FindStored(const VersionId& id, std::string_view track,
                                      const Selection& selection) ABSL_LOCKS_EXCLUDED(mu_);

  // The version that Open() of this track would open for version 0. nullopt: nothing has been
  // committed yet, or the track is synthesized, so its values can change while its version does
  // not. NOT_FOUND, TRACK_NOT_FOUND. Or the status given to Model::Close().
  absl::StatusOr<std::optional<Version>> NewestOf(std::string_view track);
  // Like VersionHistory::FindStep(), for Open() of this track. OUT_OF_RANGE, VERSION_NOT_KEPT: the
  // track is synthesized, and of another step.
  absl::StatusOr<std::optional<VersionId>> FindStep(std::string_view track, int64_t step);

 private:
  // `track` is one of `snapshot`'s.
  absl::StatusOr<std::shared_ptr<Reading>> Share(SnapshotRef snapshot, const TrackSnapshot& track,
                                                 const Selection& selection)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Returns a held reading of `selection` that `matches`. If there is none, returns `made`, which
  // may be null, and remembers it.
  std::shared_ptr<Reading> Find(const Selection& selection,
                                absl::FunctionRef<bool(const Reading&)> matches,
                                const std::shared_ptr<Reading>& made = nullptr)
      ABSL_LOCKS_EXCLUDED(mu_);

  VersionHistory* const history_;
  TrackTable* const tracks_;
  const Manifest* const manifest_;
  Device* const device_;
  MemoryBudget* const budget_;
  const KeepAlive keep_alive_;
  absl::Mutex mu_;
  std::vector<std::weak_ptr<Reading>> readings_ ABSL_GUARDED_BY(mu_);  // Some have expired.
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_READING_CACHE_H_
