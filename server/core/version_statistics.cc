// SPDX-License-Identifier: Apache-2.0
#include "server/core/version_statistics.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

bool IsAveraging(const TrackSnapshot& track) {
  const std::vector<TensorAction>& actions = track.track->actions();
  return std::find(actions.begin(), actions.end(), TensorAction::kAverage) != actions.end();
}

// Whose values are the raw ones; null: no track copies.
const TrackSnapshot* CopyTrackOf(const Snapshot& version) {
  const auto it = std::find_if(
      version.tracks.begin(), version.tracks.end(),
      [](const TrackSnapshot& track) { return track.track->config().schedule.is_copy(); });
  return it != version.tracks.end() ? &*it : nullptr;
}

// Elements that lie side by side in a block; they may reach behind their tensor's end.
struct ContiguousRange {
  const std::byte* data;
  int64_t element_count;
};

// From an element of a tensor on.
ContiguousRange RangeFrom(const TrackSnapshot& snapshot, int64_t tensor_index, int64_t element) {
  const Track& track = *snapshot.track;
  const StorageLayout::Entry& entry = track.layout().entry(tensor_index);
  const int64_t size = DtypeSize(entry.dtype);
  const int64_t byte = entry.offset + element * size;
  const int64_t block = track.FindBlock(byte);
  return {snapshot.blocks[block]->data() + (byte - track.block_start(block)),
          (track.block_start(block + 1) - byte) / size};
}

// All of a tensor that `average` averages and `raw`, unless that is null, copies.
void AddRuns(const TrackSnapshot& average, const TrackSnapshot* raw, int64_t tensor_index,
             int64_t element_count, std::vector<SumRun>& runs) {
  for (int64_t done = 0; done < element_count;) {
    const ContiguousRange averages = RangeFrom(average, tensor_index, done);
    SumRun run = {.average = averages.data,
                  .element_count = std::min(averages.element_count, element_count - done),
                  .average_dtype = average.track->config().dtype};
    if (raw != nullptr) {
      const ContiguousRange raws = RangeFrom(*raw, tensor_index, done);
      run.raw = raws.data;
      run.raw_dtype = raw->track->layout().entry(tensor_index).dtype;
      run.element_count = std::min(run.element_count, raws.element_count);
    }
    runs.push_back(run);
    done += run.element_count;
  }
}

absl::StatusOr<TrackStatistics> Compute(const Snapshot& version, const TrackSnapshot& track,
                                        const Manifest& manifest, Device& device) {
  const TrackSnapshot* const copy = CopyTrackOf(version);
  bool has_raw = false;
  std::vector<SumRun> runs;
  for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
    if (track.track->action(i) != TensorAction::kAverage) continue;
    const bool is_copied = copy != nullptr && copy->track->action(i) == TensorAction::kCopy;
    has_raw |= is_copied;
    AddRuns(track, is_copied ? copy : nullptr, i, manifest.tensor(i).element_count(), runs);
  }
  EMA_ASSIGN_OR_RETURN(const SquareSums sums, device.SumSquares(runs));
  TrackStatistics statistics = {.track = track.track->name(), .norm = std::sqrt(sums.average)};
  if (has_raw) statistics.distance = std::sqrt(sums.difference);
  return statistics;
}

// The tracks that statistics are asked for.
absl::StatusOr<std::vector<const TrackSnapshot*>> AveragingTracks(
    const TrackTable& table, const Snapshot& version, absl::Span<const std::string> names) {
  std::vector<const TrackSnapshot*> tracks;
  for (const std::string& name : names) {
    EMA_ASSIGN_OR_RETURN(const TrackSnapshot* const track, table.FindIn(version, name));
    if (!IsAveraging(*track)) return AveragesNothingError(*track);
    tracks.push_back(track);
  }
  if (!names.empty()) return tracks;
  for (const TrackSnapshot& track : version.tracks) {
    if (IsAveraging(track)) tracks.push_back(&track);
  }
  return tracks;
}

}  // namespace

std::optional<TrackStatistics> FindStatistics(const VersionHistory& history, const VersionId& id,
                                              std::string_view track) {
  const std::optional<Version> record = history.FindRecord(id);
  if (!record.has_value()) return std::nullopt;
  for (const TrackStatistics& known : record->statistics) {
    if (known.track == track) return known;
  }
  return std::nullopt;
}

absl::Status AveragesNothingError(const TrackSnapshot& track) {
  return BadRequest(absl::StrCat("tracks: \"", track.track->name(), "\" averages no tensor (",
                                 track.track->config_text(), ")"));
}

absl::StatusOr<std::vector<TrackStatistics>> ComputePartStatistics(
    Model& partition, const Snapshot& version, absl::Span<const std::string> tracks) {
  std::vector<TrackStatistics> all;
  for (const std::string& name : tracks) {
    EMA_ASSIGN_OR_RETURN(const TrackSnapshot* const track,
                         partition.tracks().FindIn(version, name));
    if (!IsAveraging(*track)) continue;
    EMA_ASSIGN_OR_RETURN(TrackStatistics statistics,
                         Compute(version, *track, partition.manifest(), partition.device()));
    all.push_back(std::move(statistics));
  }
  return all;
}

absl::StatusOr<Version> ComputeStatistics(Model& model, const VersionId& id,
                                          absl::Span<const std::string> tracks) {
  EMA_ASSIGN_OR_RETURN(const SnapshotRef snapshot, model.history().Pin(id.version, id.incarnation));
  EMA_ASSIGN_OR_RETURN(const std::vector<const TrackSnapshot*> wanted,
                       AveragingTracks(model.tracks(), *snapshot, tracks));
  Version record = snapshot->record;
  for (const TrackSnapshot* const track : wanted) {
    std::optional<TrackStatistics> statistics =
        FindStatistics(model.history(), record.id(), track->track->name());
    if (!statistics.has_value()) {
      EMA_ASSIGN_OR_RETURN(statistics,
                           Compute(*snapshot, *track, model.manifest(), model.device()));
      model.history().AddStatistics(record.id(), *statistics);
    }
    record.statistics.push_back(*std::move(statistics));
  }
  return record;
}

std::vector<StatisticsPoint> StatisticsHistory(const VersionHistory& history, size_t limit) {
  std::vector<StatisticsPoint> all;
  history.VisitRecords([&](const Version& record) {
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
