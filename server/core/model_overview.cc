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

ModelOverview Model::Overview() const {
  // A track without statistics would have all records searched for them.
  constexpr int kSearchedRecords = 1024;
  ModelOverview overview;
  overview.reserved_bytes = tracks_.reserved_bytes();
  std::shared_ptr<PushSession> session;
  {
    absl::MutexLock lock(&mu_);
    if (const SnapshotRef newest = history_.newest(); newest != nullptr) {
      overview.step = newest->record.step;
      overview.version = newest->record.id();
      overview.commit_time = newest->record.commit_time;
    }
    overview.durable_version = durable_.version();
    overview.durable_step = durable_.step();
    if (const std::optional<Version> record = history_.FindRecord(overview.durable_version)) {
      overview.durable_commit_time = record->commit_time;
    }
    overview.begun_step = open_step_.begun_step();
    for (const TrackRef& track : tracks_.state().tracks) {
      overview.tracks.push_back(
          {track->name(), track->config_text(), track->config().paused, 0, std::nullopt});
    }
    int searched = 0;
    history_.VisitRecords([&](const Version& record) {
      return ++searched <= kSearchedRecords && AddFrom(record, overview.tracks);
    });
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
  history_.VisitRecords([&](const Version& record) {
    if (!record.statistics.empty()) all.push_back({record.step, record.statistics});
    return true;
  });
  std::reverse(all.begin(), all.end());
  if (all.size() <= limit) return all;
  std::vector<StatisticsPoint> thinned;
  for (size_t i = 0; i < limit; ++i) {
    thinned.push_back(std::move(all[(i + 1) * all.size() / limit - 1]));
  }
  return thinned;
}

}  // namespace ema
