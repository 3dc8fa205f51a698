// SPDX-License-Identifier: Apache-2.0
#include "client/cli/tracks_command.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/output.h"
#include "ema/internal/status_macros.h"

namespace ema::cli {
namespace {

// One track, and its record in the newest version.
struct Standing {
  TrackConfig config;
  std::string kept_as;
  std::string state;
  const TrackVersion* last = nullptr;  // Null: it has no value yet.
  const TrackStatistics* statistics = nullptr;
};

const TrackConfig* Find(const std::vector<TrackConfig>& tracks, const std::string& name) {
  const auto it = std::find_if(tracks.begin(), tracks.end(),
                               [&](const TrackConfig& track) { return track.name == name; });
  return it == tracks.end() ? nullptr : &*it;
}

std::string KeptAs(const TrackConfig& track) {
  if (track.schedule.is_copy()) return "as pushed";
  return std::string(DtypeName(track.dtype));
}

// The state of a current track. `pending`: all tracks after the next commit.
std::string StateOf(const TrackConfig& track,
                    const std::optional<std::vector<TrackConfig>>& pending) {
  std::string state = track.paused ? "paused" : "active";
  if (!pending.has_value()) return state;
  const TrackConfig* const next = Find(*pending, track.name);
  if (next == nullptr) return state + ", removed by the next commit";
  return *next == track ? state : state + ", changed by the next commit";
}

std::vector<Standing> StandingsOf(const ModelInfo& model) {
  std::vector<Standing> standings;
  for (const TrackConfig& track : model.tracks) {
    standings.push_back({track, KeptAs(track), StateOf(track, model.pending_tracks)});
  }
  if (model.pending_tracks.has_value()) {
    for (const TrackConfig& track : *model.pending_tracks) {
      if (Find(model.tracks, track.name) != nullptr) continue;
      standings.push_back({track, KeptAs(track), "from the next commit on"});
    }
  }
  if (!model.latest.has_value()) return standings;
  for (Standing& standing : standings) {
    for (const TrackVersion& track : model.latest->tracks) {
      if (track.track == standing.config.name) standing.last = &track;
    }
    for (const TrackStatistics& track : model.latest->statistics) {
      if (track.track == standing.config.name) standing.statistics = &track;
    }
  }
  return standings;
}

void to_json(Json& json, const Standing& standing) {
  json = TrackJson(standing.config);
  json["kept_as"] = standing.kept_as;
  json["state"] = standing.state;
  const TrackVersion* const last = standing.last;
  json["update_count"] = last == nullptr ? 0 : last->update_count;
  json["update_weight"] = last == nullptr || !last->updated ? Json() : Json(last->update_weight);
  const TrackStatistics* const statistics = standing.statistics;
  json["norm"] = statistics == nullptr ? Json() : Json(statistics->norm);
  json["distance"] = statistics == nullptr ? Json() : Json(statistics->distance);
}

}  // namespace

std::string TrackTable(const ModelInfo& model) {
  Table table({"TRACK", "SCHEDULE", "KEPT AS", "UPDATES", "WEIGHT", "NORM", "DISTANCE", "STATE"});
  for (const Standing& standing : StandingsOf(model)) {
    const TrackVersion* const last = standing.last;
    const TrackStatistics* const statistics = standing.statistics;
    const bool has_distance = statistics != nullptr && statistics->distance.has_value();
    table.Add(
        {standing.config.name, TrackText(standing.config), standing.kept_as,
         absl::StrCat(last == nullptr ? 0 : last->update_count),
         // The weight of this version's update, if the track was due.
         last == nullptr || !last->updated ? "-" : absl::StrFormat("%.4g", last->update_weight),
         statistics == nullptr ? "-" : absl::StrCat(statistics->norm),
         has_distance ? absl::StrCat(*statistics->distance) : "-", standing.state});
  }
  return table.ToString();
}

absl::Status Tracks(const Session& session, const std::string& model) {
  EMA_ASSIGN_OR_RETURN(const ModelInfo info, session.client->GetModel(model, session.timeout));
  const std::string where = info.latest.has_value() ? absl::StrCat("version ", info.latest->number,
                                                                   ", step ", info.latest->step)
                                                    : "nothing committed yet";
  return PrintResult(session.json,
                     {{"model", info.name},
                      {"version", info.latest.has_value() ? Json(info.latest->number) : Json()},
                      {"step", info.latest.has_value() ? Json(info.latest->step) : Json()},
                      {"tracks", StandingsOf(info)}},
                     absl::StrCat("model ", info.name, ", ", where, "\n\n", TrackTable(info)));
}

}  // namespace ema::cli
