// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/due_tracks.h"

#include <algorithm>
#include <utility>

#include "ema/internal/status_macros.h"
#include "ema/track.h"

namespace ema::client_internal {

bool DueTracks::Adopt(RunPlan plan) {
  if (plan.revision == revision_) return false;
  revision_ = plan.revision;
  for (RunPlan::Entry& entry : plan.tracks) {
    const auto same = std::find_if(tracks_.begin(), tracks_.end(), [&](const auto& known) {
      return known.track.name == entry.track.name &&
             (known.track_id == entry.track_id || known.track_id == 0);
    });
    if (same != tracks_.end()) entry.state = std::move(same->state);
  }
  tracks_ = std::move(plan.tracks);
  return true;
}

absl::StatusOr<std::vector<DueTracks::Due>> DueTracks::At(const TrainingTime& now) const {
  const bool all_paused = std::all_of(tracks_.begin(), tracks_.end(),
                                      [](const auto& entry) { return entry.track.paused; });
  std::vector<Due> result;
  for (size_t i = 0; i < tracks_.size(); ++i) {
    if (tracks_[i].track.paused && !all_paused) continue;
    EMA_ASSIGN_OR_RETURN(std::vector<Schedule::Update> updates,
                         PlanTrack(tracks_[i].track, tracks_[i].state, now));
    if (IsDue(updates)) result.push_back({i, std::move(updates)});
  }
  return result;
}

void DueTracks::Count(absl::Span<const Due> due, const TrainingTime& now) {
  for (const auto& [index, updates] : due) {
    RunPlan::Entry& entry = tracks_[index];
    entry.state = NextState(entry.track, entry.state, updates, now);
  }
}

bool DueTracks::ArePaused(absl::Span<const Due> due) const {
  return std::all_of(due.begin(), due.end(),
                     [this](const Due& one) { return tracks_[one.index].track.paused; });
}

}  // namespace ema::client_internal
