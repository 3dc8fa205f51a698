// SPDX-License-Identifier: Apache-2.0
#include "server/core/model_overview.h"

#include <algorithm>

#include "absl/time/time.h"
#include "server/base/steady_wait.h"
#include "server/core/model.h"
#include "server/core/push_session.h"

namespace ema {
namespace {

constexpr int64_t kShownRanks = 8;

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

ModelOverview OverviewOf(const Model& model) {
  // A track without statistics would have all records searched for them.
  constexpr int kSearchedRecords = 1024;
  const Model::Description now = model.Describe();
  ModelOverview overview{.begun_step = now.begun_step, .reserved_bytes = now.reserved_bytes};
  if (now.latest.has_value()) {
    overview.step = now.latest->step;
    overview.version = now.latest->id();
    overview.commit_time = now.latest->commit_time;
  }
  overview.durable_version = now.saved.version;
  overview.durable_step = now.saved.step;
  if (const std::optional<Version> record = model.history().FindRecord(overview.durable_version)) {
    overview.durable_commit_time = record->commit_time;
  }
  for (const TrackRef& track : now.tracks) {
    overview.tracks.push_back(
        {track->name(), track->config_text(), track->config().paused, 0, std::nullopt});
  }
  int searched = 0;
  model.history().VisitRecords([&](const Version& record) {
    return ++searched <= kSearchedRecords && AddFrom(record, overview.tracks);
  });
  overview.run = now.run;
  if (now.session != nullptr) {
    const auto age = SteadyNow() - now.session->begin();
    overview.session = {now.session->plan().step, absl::FromChrono(age),
                        now.session->MissingRanks(kShownRanks)};
  }
  return overview;
}

}  // namespace ema
