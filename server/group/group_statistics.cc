// SPDX-License-Identifier: Apache-2.0
#include "server/group/group_statistics.h"

#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/core/version_statistics.h"
#include "server/group/pin_published.h"
#include "server/wire/convert_types.h"

namespace ema::group {
namespace {

using StatisticsByTrack = std::map<std::string, TrackStatistics>;

// The norm of two vectors laid end to end. Exact if one of them is 0.
double JoinNorms(double a, double b) { return std::sqrt(a * a + b * b); }

void AddPart(const TrackStatistics& part, StatisticsByTrack& whole) {
  const auto [it, is_first] = whole.try_emplace(part.track, part);
  if (is_first) return;
  TrackStatistics& sum = it->second;
  sum.norm = JoinNorms(sum.norm, part.norm);
  if (!part.distance.has_value()) return;
  sum.distance = JoinNorms(sum.distance.value_or(0), *part.distance);
}

// Of all partitions, without the tracks that average no tensor.
absl::StatusOr<StatisticsByTrack> Compute(
    Model& home, const Snapshot& version, const std::vector<std::string>& tracks,
    const std::vector<Partition>& partitions,
    absl::FunctionRef<absl::Status(const v1::GetPartStatisticsRequest&, StatisticsCalls&)> start) {
  v1::GetPartStatisticsRequest request;
  request.set_model(home.config().name);
  request.set_incarnation(home.incarnation());
  request.mutable_version()->set_version(version.record.number);
  request.mutable_version()->set_incarnation(version.record.incarnation);
  request.mutable_tracks()->Assign(tracks.begin(), tracks.end());
  StatisticsCalls calls(partitions);
  EMA_RETURN_IF_ERROR(start(request, calls));
  const auto own = ComputePartStatistics(home, version, tracks);
  calls.EndOf(0)(v1::GetPartStatisticsResponse());
  const auto others = calls.Wait();
  EMA_RETURN_IF_ERROR(own.status());
  EMA_RETURN_IF_ERROR(others.status());
  StatisticsByTrack whole;
  for (const TrackStatistics& part : *own) AddPart(part, whole);
  for (const v1::GetPartStatisticsResponse& other : *others) {
    for (const v1::TrackStatistics& part : other.statistics()) {
      AddPart(ema::FromProto(part), whole);
    }
  }
  return whole;
}

}  // namespace

absl::StatusOr<Version> ComputeGroupStatistics(
    Model& home, const VersionId& id, absl::Span<const std::string> tracks,
    const std::vector<Partition>& partitions,
    absl::FunctionRef<absl::Status(const v1::GetPartStatisticsRequest&, StatisticsCalls&)> start) {
  EMA_ASSIGN_OR_RETURN(const SnapshotRef snapshot, home.history().Pin(id.version, id.incarnation));
  std::vector<const TrackSnapshot*> wanted;
  for (const std::string& name : tracks) {
    EMA_ASSIGN_OR_RETURN(wanted.emplace_back(), home.tracks().FindIn(*snapshot, name));
  }
  if (tracks.empty()) {
    for (const TrackSnapshot& track : snapshot->tracks) {
      if (!track.track->config().schedule.is_copy()) wanted.push_back(&track);
    }
  }
  Version record = snapshot->record;
  StatisticsByTrack found;
  std::vector<std::string> missing;
  for (const TrackSnapshot* const track : wanted) {
    const std::string& name = track->track->name();
    const auto known = FindStatistics(home.history(), record.id(), name);
    known.has_value() ? (void)found.emplace(name, *known) : missing.push_back(name);
  }
  if (!missing.empty()) {
    EMA_ASSIGN_OR_RETURN(const StatisticsByTrack computed,
                         Compute(home, *snapshot, missing, partitions, start));
    for (const auto& [name, statistics] : computed) {
      home.history().AddStatistics(record.id(), statistics);
      found.emplace(name, statistics);
    }
  }
  for (const TrackSnapshot* const track : wanted) {
    const auto it = found.find(track->track->name());
    if (it != found.end()) {
      record.statistics.push_back(it->second);
    } else if (!tracks.empty()) {
      return AveragesNothingError(*track);
    }
  }
  return record;
}

absl::StatusOr<v1::GetPartStatisticsResponse> GetPartStatistics(
    Model& partition, const v1::GetPartStatisticsRequest& request) {
  EMA_ASSIGN_OR_RETURN(
      const SnapshotRef version,
      PinPublished(partition, {request.version().version(), request.version().incarnation()},
                   &VersionHistory::Pin));
  const std::vector<std::string> tracks(request.tracks().begin(), request.tracks().end());
  EMA_ASSIGN_OR_RETURN(const std::vector<TrackStatistics> all,
                       ComputePartStatistics(partition, *version, tracks));
  v1::GetPartStatisticsResponse response;
  for (const TrackStatistics& statistics : all) {
    ema::ToProto(statistics, response.add_statistics());
  }
  return response;
}

}  // namespace ema::group
