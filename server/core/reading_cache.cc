// SPDX-License-Identifier: Apache-2.0
#include "server/core/reading_cache.h"

#include <utility>

#include "ema/internal/status_macros.h"

namespace ema {
namespace {

// Matches the readings of that track of that version from the disk.
auto IsStoredAs(const VersionId& id, std::string_view track) {
  return [id, track](const Reading& reading) {
    return reading.is_stored() && reading.snapshot()->record.id() == id &&
           reading.track().track->name() == track;
  };
}

}  // namespace

absl::StatusOr<std::shared_ptr<Reading>> ReadingCache::Open(SnapshotRef snapshot,
                                                            const TrackSnapshot& track,
                                                            const Selection& selection) {
  // Each reader opens a stored version for itself: another object with the same bytes.
  const auto is_stored = IsStoredAs(snapshot->record.id(), track.track->name());
  const auto is_same = [&](const Reading& reading) {
    return &reading.track() == &track || (track.stored != nullptr && is_stored(reading));
  };
  if (std::shared_ptr<Reading> reading = Find(selection, is_same)) return reading;
  EMA_ASSIGN_OR_RETURN(
      std::shared_ptr<Reading> made,
      Reading::Create(std::move(snapshot), track, *manifest_, *device_, *budget_, selection));
  // Another thread may have made the same meanwhile.
  return Find(selection, is_same, made);
}

std::shared_ptr<Reading> ReadingCache::FindStored(const VersionId& id, std::string_view track,
                                                  const Selection& selection) {
  return Find(selection, IsStoredAs(id, track));
}

std::shared_ptr<Reading> ReadingCache::Find(const Selection& selection,
                                            absl::FunctionRef<bool(const Reading&)> matches,
                                            const std::shared_ptr<Reading>& made) {
  // One of these may become the last reference, which frees much: it is dropped without the lock.
  std::vector<std::shared_ptr<Reading>> others;
  absl::MutexLock lock(&mu_);
  std::erase_if(readings_, [](const std::weak_ptr<Reading>& held) { return held.expired(); });
  for (const std::weak_ptr<Reading>& held : readings_) {
    std::shared_ptr<Reading> reading = held.lock();
    if (reading == nullptr) continue;
    if (matches(*reading) && reading->selection() == selection) return reading;
    others.push_back(std::move(reading));
  }
  if (made != nullptr) readings_.push_back(made);
  return made;
}

}  // namespace ema
