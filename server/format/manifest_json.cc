// SPDX-License-Identifier: Apache-2.0
#include "server/format/manifest_json.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"
#include "server/format/checkpoint_files.h"
#include "server/format/files_json.h"
#include "server/format/json_fields.h"
#include "server/format/track_json.h"

namespace ema {
namespace {

constexpr std::string_view kFormatName = "ema-checkpoint";
// Of a version: the next ones count on from there.
constexpr int64_t kMaxCount = int64_t{1} << 62;

Json EncodeTrack(const CheckpointTrack& track, const Manifest& manifest) {
  Json states = Json::array();
  for (size_t i = 0; i < track.state.size(); ++i) {
    states.push_back(EncodeState(track.state[i]));
    states.back()["last_step"] = track.last_steps[i];
  }
  Json json = {{"config", EncodeConfig(track.config)}, {"states", std::move(states)}};
  if (track.frozen_digest != 0) json["frozen_digest"] = track.frozen_digest;
  if (track.weights.has_value()) json["weights"] = EncodeTensorFiles(*track.weights, manifest);
  if (track.low_parts.has_value()) {
    json["low_parts"] = EncodeTensorFiles(*track.low_parts, manifest);
  }
  return json;
}

Json EncodeVersion(const Version& record) {
  Json json = {{"incarnation", record.incarnation},
               {"version", record.number},
               {"step", record.step},
               {"run_epoch", record.run_epoch},
               {"commit_time_us", absl::ToUnixMicros(record.commit_time)},
               {"time", EncodeTime(record.time)},
               {"tracks", Json::array()},
               {"skipped_tensor_count", record.skipped_tensor_count},
               {"skipped_tensors", record.skipped_tensors},
               {"wire_dtype", WireDtypeName(record.wire_dtype)}};
  for (const TrackVersion& track : record.tracks) json["tracks"].push_back(EncodeRecord(track));
  if (record.restored_from.has_value()) {
    json["restored_from"] = {{"version", record.restored_from->version},
                             {"incarnation", record.restored_from->incarnation}};
  }
  return json;
}

// What the track's files have, put into `track`.
absl::StatusOr<CheckpointTrack> ParseFiles(const Fields& fields, const Manifest& manifest,
                                           CheckpointTrack track) {
  if (!fields.Has("weights")) return track;
  EMA_ASSIGN_OR_RETURN(const Fields weights, fields.Object("weights"));
  EMA_ASSIGN_OR_RETURN(track.weights, ParseTensorFiles(weights, TensorKind::kWeights, manifest));
  if (track.config.compensated) {
    EMA_ASSIGN_OR_RETURN(const Fields low_parts, fields.Object("low_parts"));
    EMA_ASSIGN_OR_RETURN(track.low_parts,
                         ParseTensorFiles(low_parts, TensorKind::kLowParts, manifest));
  }
  return track;
}

absl::StatusOr<CheckpointTrack> ParseTrack(const Fields& fields, const Manifest& manifest) {
  EMA_ASSIGN_OR_RETURN(const Fields config_fields, fields.Object("config"));
  EMA_ASSIGN_OR_RETURN(TrackConfig config, ParseConfig(config_fields));
  CheckpointTrack track{.config = std::move(config)};
  EMA_RETURN_IF_ERROR(fields.ForEachObject("states", [&](const Fields& state) -> absl::Status {
    EMA_ASSIGN_OR_RETURN(track.state.emplace_back(), ParseState(state));
    EMA_ASSIGN_OR_RETURN(track.last_steps.emplace_back(), state.Integer("last_step", 0));
    return absl::OkStatus();
  }));
  if (fields.Has("frozen_digest")) {
    EMA_ASSIGN_OR_RETURN(track.frozen_digest, fields.Integer("frozen_digest", 0));
  }
  // Without weights it had no updates, and states are of updates.
  const size_t state_count = fields.Has("weights") ? SchedulesOf(track.config).size() : 0;
  if (track.state.size() != state_count) {
    return CorruptManifest(absl::StrCat("track \"", track.config.name, "\" has ",
                                        track.state.size(), " states, expected ", state_count));
  }
  return ParseFiles(fields, manifest, std::move(track));
}

absl::StatusOr<Manifest> ParseTensors(const Json& json) {
  std::vector<TensorSpec> tensors;
  tensors.reserve(json.size());
  for (const Json& element : json) {
    EMA_ASSIGN_OR_RETURN(const Fields fields,
                         Fields::Of(element, absl::StrCat("tensors[", tensors.size(), "].")));
    TensorSpec& spec = tensors.emplace_back();
    EMA_ASSIGN_OR_RETURN(spec.name, fields.String("name"));
    EMA_ASSIGN_OR_RETURN(const std::string dtype, fields.String("dtype"));
    absl::StatusOr<Dtype> parsed = ParseDtype(dtype);
    if (!parsed.ok()) return fields.Bad(parsed.status());
    spec.dtype = *parsed;
    EMA_ASSIGN_OR_RETURN(spec.is_buffer, fields.Boolean("is_buffer"));
    EMA_ASSIGN_OR_RETURN(spec.aliases, fields.Texts("aliases"));
    EMA_ASSIGN_OR_RETURN(const Json* shape, fields.Array("shape"));
    for (const Json& extent : *shape) {
      if (!extent.is_number_unsigned() || extent.get<uint64_t>() > INT64_MAX) {
        return CorruptManifest(absl::StrCat("tensor \"", spec.name, "\" has a bad shape"));
      }
      spec.shape.push_back(extent.get<int64_t>());
    }
  }
  absl::StatusOr<Manifest> manifest = Manifest::Create(std::move(tensors));
  if (!manifest.ok()) return CorruptManifest(std::string(manifest.status().message()));
  return manifest;
}

absl::Status ParseVersion(const Fields& fields, Version& record) {
  EMA_ASSIGN_OR_RETURN(record.incarnation, fields.Integer("incarnation", 0, kMaxCount));
  EMA_ASSIGN_OR_RETURN(record.number, fields.Integer("version", 1, kMaxCount));
  EMA_ASSIGN_OR_RETURN(record.step, fields.Integer("step", 0, kMaxCount));
  EMA_ASSIGN_OR_RETURN(record.run_epoch, fields.Integer("run_epoch", 0, kMaxCount));
  EMA_ASSIGN_OR_RETURN(const int64_t commit_time_us, fields.Integer("commit_time_us", INT64_MIN));
  record.commit_time = absl::FromUnixMicros(commit_time_us);
  EMA_ASSIGN_OR_RETURN(const Fields time, fields.Object("time"));
  EMA_ASSIGN_OR_RETURN(record.time, ParseTime(time));
  EMA_RETURN_IF_ERROR(
      fields.ForEachObject("tracks", [&record](const Fields& track) -> absl::Status {
        EMA_ASSIGN_OR_RETURN(TrackVersion parsed, ParseRecord(track));
        record.tracks.push_back(std::move(parsed));
        return absl::OkStatus();
      }));
  EMA_ASSIGN_OR_RETURN(record.skipped_tensor_count, fields.Integer("skipped_tensor_count", 0));
  EMA_ASSIGN_OR_RETURN(record.skipped_tensors, fields.Texts("skipped_tensors"));
  // Manifests of before do not have it.
  if (fields.Has("wire_dtype")) {
    EMA_ASSIGN_OR_RETURN(const std::string name, fields.String("wire_dtype"));
    record.wire_dtype =
        name == WireDtypeName(WireDtype::kBFloat16) ? WireDtype::kBFloat16 : WireDtype::kAsPushed;
  }
  if (fields.Has("restored_from")) {
    EMA_ASSIGN_OR_RETURN(const Fields from, fields.Object("restored_from"));
    VersionId& id = record.restored_from.emplace();
    EMA_ASSIGN_OR_RETURN(id.version, from.Integer("version", 1));
    EMA_ASSIGN_OR_RETURN(id.incarnation, from.Integer("incarnation", 0));
  }
  return absl::OkStatus();
}

absl::Status CheckFormat(int64_t format_version) {
  if (format_version == kCheckpointFormatVersion) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("manifest.json: written in format_version ",
                                                    format_version, "; this build reads only ",
                                                    kCheckpointFormatVersion));
}

}  // namespace

const CheckpointTrack* CheckpointManifest::Find(std::string_view track_name) const {
  const auto it = std::find_if(tracks.begin(), tracks.end(), [&](const CheckpointTrack& track) {
    return track.config.name == track_name;
  });
  return it != tracks.end() ? &*it : nullptr;
}

int64_t CheckpointManifest::FolderBytes(const CheckpointTrack& track) const {
  if (!track.weights.has_value()) return 0;
  int64_t bytes = 0;
  for (const std::optional<TensorFiles>* files : {&track.weights, &track.low_parts}) {
    if (!files->has_value()) continue;
    for (const TensorFile& file : (*files)->files) bytes += file.file_bytes;
    if ((*files)->index.has_value()) bytes += (*files)->index->file_bytes;
  }
  for (const SmallFile& file : attached_files) bytes += file.file_bytes;
  return bytes;
}

std::string EncodeCheckpointManifest(const CheckpointManifest& manifest) {
  Json created_tracks = Json::array();
  for (const TrackConfig& track : manifest.created_tracks) {
    created_tracks.push_back(EncodeConfig(track));
  }
  Json tracks = Json::array();
  for (const CheckpointTrack& track : manifest.tracks) {
    tracks.push_back(EncodeTrack(track, manifest.manifest));
  }
  Json tensors = Json::array();
  for (const TensorSpec& spec : manifest.manifest.tensors()) {
    tensors.push_back({{"name", spec.name},
                       {"dtype", std::string(DtypeName(spec.dtype))},
                       {"shape", spec.shape},
                       {"is_buffer", spec.is_buffer},
                       {"aliases", spec.aliases}});
  }
  const std::pair<const char*, Json> members[] = {
      {"format", std::string(kFormatName)},
      {"format_version", kCheckpointFormatVersion},
      {"model", manifest.model_name},
      {"max_pinned_versions", manifest.max_pinned_versions},
      {"non_finite", static_cast<int>(manifest.non_finite)},
      {"version", EncodeVersion(manifest.record)},
      {"is_partial", manifest.is_partial},
      {"total_bytes", manifest.total_bytes},
      {"attached_files", EncodeAttachedFiles(manifest.attached_files)},
      {"created_tracks", std::move(created_tracks)},
      {"tracks", std::move(tracks)},
      {"tensors", std::move(tensors)}};
  // One member a line: readable, without a line for each of 200 000 checksums.
  std::string covered;
  for (const auto& [key, value] : members) {
    absl::StrAppend(&covered, covered.empty() ? "" : ",\n", "\"", key, "\": ", value.dump());
  }
  covered += "\n}\n";
  return AddChecksum(covered);
}

absl::StatusOr<CheckpointManifest> ParseCheckpointManifest(std::string_view text) {
  if (!HasRightChecksum(text)) return CorruptManifest("the checksum is wrong, or missing");
  const std::optional<Json> json = ParseStrictJson(text);
  if (!json.has_value()) return CorruptManifest("it is not JSON of the right form");
  EMA_ASSIGN_OR_RETURN(const Fields fields, Fields::Of(*json, ""));
  EMA_ASSIGN_OR_RETURN(const int64_t format_version, fields.Integer("format_version", 1));
  EMA_RETURN_IF_ERROR(CheckFormat(format_version));

  CheckpointManifest manifest;
  EMA_ASSIGN_OR_RETURN(manifest.model_name, fields.String("model"));
  EMA_ASSIGN_OR_RETURN(manifest.max_pinned_versions, fields.Integer("max_pinned_versions", 1));
  EMA_ASSIGN_OR_RETURN(manifest.total_bytes, fields.Integer("total_bytes", 0));
  EMA_ASSIGN_OR_RETURN(const Json* tensors, fields.Array("tensors"));
  EMA_ASSIGN_OR_RETURN(manifest.manifest, ParseTensors(*tensors));
  EMA_ASSIGN_OR_RETURN(const Fields version, fields.Object("version"));
  EMA_RETURN_IF_ERROR(ParseVersion(version, manifest.record));
  EMA_ASSIGN_OR_RETURN(const int64_t non_finite, fields.Integer("non_finite", 1));
  if (non_finite > static_cast<int64_t>(NonFinitePolicy::kAllow)) {
    return CorruptManifest("an unknown non_finite");
  }
  manifest.non_finite = static_cast<NonFinitePolicy>(non_finite);
  EMA_RETURN_IF_ERROR(
      fields.ForEachObject("created_tracks", [&](const Fields& track) -> absl::Status {
        EMA_ASSIGN_OR_RETURN(TrackConfig config, ParseConfig(track));
        manifest.created_tracks.push_back(std::move(config));
        return absl::OkStatus();
      }));
  EMA_RETURN_IF_ERROR(fields.ForEachObject("tracks", [&](const Fields& track) -> absl::Status {
    EMA_ASSIGN_OR_RETURN(CheckpointTrack parsed, ParseTrack(track, manifest.manifest));
    manifest.tracks.push_back(std::move(parsed));
    return absl::OkStatus();
  }));
  EMA_ASSIGN_OR_RETURN(manifest.is_partial, fields.Boolean("is_partial"));
  EMA_ASSIGN_OR_RETURN(manifest.attached_files, ParseAttachedFiles(fields, "attached_files"));
  return manifest;
}

}  // namespace ema
