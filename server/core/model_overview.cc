// SPDX-License-Identifier: Apache-2.0
//
// The part of Model that says how things stand.
#include "server/core/model_overview.h"

#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "server/core/model.h"

namespace ema {
namespace {

constexpr int64_t kNamedRanks = 8;

// Adds what `record` says of tracks of which newer ones have not said it. False: older ones have
// nothing to add.
bool AddFrom(const Version& record, std::vector<ModelOverview::Track>& tracks) {
  bool is_missing = false;
  for (ModelOverview::Track& track : tracks) {
    const auto is_it = [&track](const auto& of) { return of.track == track.name; };
    const auto statistics = std::find_if(record.statistics.begin(), record.statistics.end(), is_it);
    if (!track.statistics.has_value() && statistics != record.statistics.end()) {
      track.statistics = *statistics;
    }
    const auto update = std::find_if(record.tracks.begin(), record.tracks.end(), is_it);
    if (track.update_weight == 0 && update != record.tracks.end() && update->updated) {
      track.update_weight = update->update_weight;
    }
    is_missing |= !track.statistics.has_value() || track.update_weight == 0;
  }
  return is_missing;
}

}  // namespace

std::optional<Version> Model::latest() const {
  absl::MutexLock lock(&mu_);
  if (current_ == nullptr) return std::nullopt;
  return records_.back();  // With its statistics.
}

Model::Description Model::Describe() const {
  absl::MutexLock lock(&mu_);
  Description now{.tracks = tracks_,
                  .pending_tracks = pending_tracks_.value_or(std::vector<TrackRef>()),
                  .plan_revision = plan_revision_,
                  .settings_revision = tracks_revision_ + attached_files_.revision(),
                  .reserved_bytes = ReservedBytesLocked(),
                  .run_epoch = runs_.epoch(),
                  .latest = {}};
  if (current_ != nullptr) now.latest = records_.back();
  return now;
}

std::vector<Model::RecordEntry> Model::RecordsAfter(int64_t version, int64_t incarnation,
                                                    int64_t limit) const {
  absl::MutexLock lock(&mu_);
  std::vector<RecordEntry> entries;
  auto it = std::partition_point(records_.begin(), records_.end(), [&](const Version& r) {
    const int64_t of = incarnation == 0 ? 0 : r.incarnation;
    return std::pair(of, r.number) <= std::pair(incarnation, version);
  });
  for (; it != records_.end() && static_cast<int64_t>(entries.size()) < limit; ++it) {
    entries.push_back({*it, FindSnapshotLocked(it->id()) != nullptr});
  }
  return entries;
}

ModelOverview Model::Overview() const {
  // A track without statistics would have all records searched for them.
  constexpr int kSearchedRecords = 1024;
  ModelOverview overview;
  overview.reserved_bytes = reserved_bytes();
  std::shared_ptr<PushSession> session;
  {
    absl::MutexLock lock(&mu_);
    if (current_ != nullptr) {
      overview.step = current_->record.step;
      overview.version = current_->record.id();
      overview.commit_time = current_->record.commit_time;
    }
    overview.durable_version = durable_.version();
    overview.durable_step = durable_.step();
    if (const auto record = FindRecordLocked(overview.durable_version); record != records_.end()) {
      overview.durable_commit_time = record->commit_time;
    }
    overview.begun_step = open_step_.begun_step();
    for (const TrackRef& track : tracks_) {
      overview.tracks.push_back(
          {track->name(), track->config_text(), track->config().paused, 0, std::nullopt});
    }
    int searched = 0;
    for (auto record = records_.rbegin(); record != records_.rend(); ++record) {
      if (++searched > kSearchedRecords || !AddFrom(*record, overview.tracks)) break;
    }
    if (const TrainerRun* const run = runs_.run().get(); run != nullptr) {
      overview.run = {run->epoch(), run->world_size(), run->MissingRanks(kNamedRanks),
                      run->ready()};
    }
    session = open_step_.session();
  }
  if (session != nullptr) {
    const auto age = SteadyNow() - session->begin();
    overview.session = {session->plan().step, absl::FromChrono(age),
                        session->MissingRanks(kNamedRanks)};
  }
  return overview;
}

std::vector<StatisticsPoint> Model::StatisticsHistory(size_t limit) const {
  std::vector<StatisticsPoint> all;
  {
    absl::MutexLock lock(&mu_);
    for (const Version& record : records_) {
      if (!record.statistics.empty()) all.push_back({record.step, record.statistics});
    }
  }
  if (all.size() <= limit) return all;
  std::vector<StatisticsPoint> thinned;
  for (size_t i = 0; i < limit; ++i) {
    thinned.push_back(std::move(all[(i + 1) * all.size() / limit - 1]));
  }
  return thinned;
}

}  // namespace ema
