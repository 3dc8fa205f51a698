// SPDX-License-Identifier: Apache-2.0
#include "client/cli/output.h"

#include <algorithm>
#include <cstdio>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/progress.h"

namespace ema {
namespace {

Json TracksJson(const std::vector<TrackConfig>& tracks) {
  Json json = Json::array();
  for (const TrackConfig& track : tracks) json.push_back(cli::TrackJson(track));
  return json;
}

}  // namespace

void to_json(Json& json, const Client::ListedVersion& entry) {
  json = entry.version;
  json["available"] = entry.available;
}

void to_json(Json& json, const CheckpointInfo& checkpoint) {
  const bool has_time = checkpoint.commit_time != absl::UnixEpoch();
  json = {{"checkpoint", checkpoint.name},
          {"state", CheckpointStateName(checkpoint.state)},
          {"incarnation", checkpoint.id.incarnation},
          {"version", checkpoint.id.version},
          {"step", checkpoint.step},
          {"commit_time", has_time ? Json(checkpoint.commit_time) : Json()},
          {"tracks", checkpoint.tracks},
          {"is_partial", checkpoint.is_partial},
          {"total_bytes", checkpoint.total_bytes},
          {"labels", checkpoint.labels},
          {"problem", checkpoint.problem}};
}

void to_json(Json& json, const ModelInfo& model) {
  json = {{"name", model.name},
          {"tracks", TracksJson(model.tracks)},
          {"pending_tracks",
           model.pending_tracks.has_value() ? TracksJson(*model.pending_tracks) : Json()},
          {"plan_revision", model.plan_revision},
          {"max_pinned_versions", model.max_pinned_versions},
          {"non_finite", model.non_finite},
          {"reserved_bytes", model.reserved_bytes},
          {"run_epoch", model.run_epoch},
          {"latest", model.latest},
          {"attached_files", Json::object()}};
  for (const ModelInfo::AttachedFile& file : model.attached_files) {
    json["attached_files"][file.name] = file.total_bytes;
  }
  if (model.manifest.tensor_count() == 0) {
    // An entry of a list, which has no rules either.
    for (const char* tracks : {"tracks", "pending_tracks"}) {
      for (Json& track : json[tracks]) track.erase("tensor_rules");
    }
    return;
  }
  json["total_bytes"] = model.manifest.total_bytes();
  json["tensors"] = model.manifest;
}

}  // namespace ema

namespace ema::cli {
namespace {

std::string LocalTime(absl::Time time) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S", time, absl::LocalTimeZone());
}

std::string JoinTracks(const ModelInfo& model) {
  return absl::StrJoin(model.tracks, ", ", [](std::string* out, const TrackConfig& track) {
    absl::StrAppend(out, track.name);
  });
}

std::string LatestVersion(const ModelInfo& model) {
  return model.latest.has_value() ? absl::StrCat(model.latest->number) : "-";
}

// The size of an incomplete checkpoint is unknown.
std::string SizeText(const CheckpointInfo& checkpoint) {
  return checkpoint.total_bytes > 0 ? FormatBytes(checkpoint.total_bytes) : "-";
}

std::string JoinOrDash(const std::vector<std::string>& words) {
  return words.empty() ? "-" : absl::StrJoin(words, ", ");
}

std::string CommitTime(absl::Time time) {
  return time == absl::UnixEpoch() ? "-" : LocalTime(time);
}

std::string StateText(const CheckpointInfo& checkpoint) {
  return absl::StrCat(std::string(CheckpointStateName(checkpoint.state)),
                      checkpoint.is_partial ? ", partial" : "");
}

}  // namespace

bool Print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
  return std::ferror(stdout) == 0;
}

std::string Dump(const Json& json, int indent) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace) + "\n";
}

absl::Status PrintResult(bool json, const Json& document, const std::string& text) {
  Print(json ? Dump(document, 2) : text);
  return absl::OkStatus();
}

Json TrackJson(const TrackConfig& track) {
  const TrainingDuration interval = track.schedule.update_interval();
  Json json = track;
  json["update_interval"] = interval.value > 0 ? Json(interval) : Json();
  return json;
}

std::string Table::ToString() const {
  std::vector<size_t> widths(rows_[0].size());
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows_) {
    for (size_t i = 0; i + 1 < row.size(); ++i) {
      absl::StrAppend(&text, row[i], std::string(widths[i] - row[i].size() + 2, ' '));
    }
    absl::StrAppend(&text, row.back(), "\n");
  }
  return text;
}

std::string DescribeUpdates(const Version& version) {
  if (version.restored_from.has_value()) {
    return absl::StrCat("rolled back to version ", version.restored_from->version);
  }
  std::vector<std::string> updates;
  for (const TrackVersion& track : version.tracks) {
    if (!track.updated) continue;
    updates.push_back(track.update_weight == 1
                          ? track.track
                          : absl::StrFormat("%s (w %.4g)", track.track, track.update_weight));
  }
  return updates.empty() ? "-" : absl::StrJoin(updates, ", ");
}

std::string DescribeVersion(const Version& version) {
  return absl::StrCat(
      LocalTime(version.commit_time), "  version ", version.number, "  step ", version.step, "  ",
      version.time.ToString(), "  ", version.restored_from.has_value() ? "" : "updated ",
      DescribeUpdates(version),
      version.wire_dtype == WireDtype::kAsPushed
          ? ""
          : absl::StrCat("  sent as ", std::string(WireDtypeName(version.wire_dtype))),
      "\n");
}

std::string StatisticsTable(const std::vector<TrackStatistics>& statistics) {
  Table table({"TRACK", "NORM", "DISTANCE"});
  for (const TrackStatistics& track : statistics) {
    table.Add({track.track, absl::StrCat(track.norm),
               track.distance.has_value() ? absl::StrCat(*track.distance) : "-"});
  }
  return table.ToString();
}

std::string CheckpointTable(const std::vector<CheckpointInfo>& checkpoints) {
  Table table({"CHECKPOINT", "VERSION", "STEP", "COMMITTED", "STATE", "SIZE", "LABELS", "PROBLEM"});
  for (const CheckpointInfo& checkpoint : checkpoints) {
    table.Add({checkpoint.name, absl::StrCat(checkpoint.id.version), absl::StrCat(checkpoint.step),
               CommitTime(checkpoint.commit_time), StateText(checkpoint), SizeText(checkpoint),
               JoinOrDash(checkpoint.labels),
               checkpoint.problem.empty() ? "-" : checkpoint.problem});
  }
  return table.ToString();
}

std::string LabelTable(const std::vector<CheckpointLabel>& labels) {
  Table table({"LABEL", "VERSION", "STEP", "METRIC"});
  for (const CheckpointLabel& label : labels) {
    table.Add({label.name, absl::StrCat(label.id.version), absl::StrCat(label.step),
               label.metric.has_value()
                   ? absl::StrCat(*label.metric, label.lower_is_better ? " (lower is better)" : "")
                   : "-"});
  }
  return table.ToString();
}

std::string DescribeCheckpoint(const CheckpointInfo& checkpoint) {
  return absl::StrCat("checkpoint ", checkpoint.name, "\nversion ", checkpoint.id.version,
                      " of incarnation ", checkpoint.id.incarnation, ", step ", checkpoint.step,
                      ", committed ", CommitTime(checkpoint.commit_time),
                      "\nstate: ", StateText(checkpoint),
                      checkpoint.problem.empty() ? "" : absl::StrCat(": ", checkpoint.problem),
                      "\nsize: ", SizeText(checkpoint), "\ntracks: ", JoinOrDash(checkpoint.tracks),
                      "\nlabels: ", JoinOrDash(checkpoint.labels), "\n");
}

std::string ModelTable(const std::vector<ModelInfo>& models) {
  Table table({"MODEL", "VERSION", "STEP", "RESERVED", "TRACKS"});
  for (const ModelInfo& model : models) {
    table.Add({model.name, LatestVersion(model),
               model.latest.has_value() ? absl::StrCat(model.latest->step) : "-",
               FormatBytes(model.reserved_bytes), JoinTracks(model)});
  }
  return table.ToString();
}

std::string VersionTable(const std::vector<Client::ListedVersion>& versions) {
  Table table({"VERSION", "STEP", "COMMITTED", "PULLABLE", "UPDATED"});
  for (const Client::ListedVersion& entry : versions) {
    table.Add({absl::StrCat(entry.version.number), absl::StrCat(entry.version.step),
               LocalTime(entry.version.commit_time), entry.available ? "yes" : "no",
               DescribeUpdates(entry.version)});
  }
  return table.ToString();
}

std::string DescribeModel(const ModelInfo& model) {
  std::string text = absl::StrCat(
      "model ", model.name, "\n", model.manifest.tensor_count(), " tensors, ",
      FormatBytes(model.manifest.total_bytes()), " as pushed; ", FormatBytes(model.reserved_bytes),
      " reserved; at most ", model.max_pinned_versions,
      " versions pinned; NaN or infinity: ", std::string(NonFinitePolicyName(model.non_finite)),
      "\n");
  if (model.latest.has_value()) {
    absl::StrAppend(&text, "latest: ", DescribeVersion(*model.latest));
  } else {
    absl::StrAppend(&text, "nothing committed yet\n");
  }
  Table tracks({"TRACK", "SCHEDULE"});
  for (const TrackConfig& track : model.tracks) {
    tracks.Add({track.name, TrackText(track)});
  }
  std::string pending;
  if (model.pending_tracks.has_value()) {
    Table table({"FROM THE NEXT COMMIT", "SCHEDULE"});
    for (const TrackConfig& track : *model.pending_tracks) {
      table.Add({track.name, TrackText(track)});
    }
    pending = absl::StrCat("\n", table.ToString());
  }
  std::string files;
  if (!model.attached_files.empty()) {
    Table table({"FILE", "BYTES"});
    for (const ModelInfo::AttachedFile& file : model.attached_files) {
      table.Add({file.name, absl::StrCat(file.total_bytes)});
    }
    files = absl::StrCat("\n", table.ToString());
  }
  Table tensors({"TENSOR", "TYPE", "SIZE"});
  for (const TensorSpec& tensor : model.manifest.tensors()) {
    tensors.Add({tensor.name, tensor.TypeString(), FormatBytes(tensor.byte_count())});
  }
  return absl::StrCat(text, "\n", tracks.ToString(), pending, files, "\n", tensors.ToString());
}

}  // namespace ema::cli
