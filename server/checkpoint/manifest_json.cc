// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/manifest_json.h"

#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/checkpoint/json_fields.h"

namespace ema {
namespace {

constexpr std::string_view kFormatName = "ema-checkpoint";
// The text before the checksum, and between it and the bytes that it covers.
constexpr std::string_view kOpening = "{\n\"crc32c\": \"";
constexpr std::string_view kAfterChecksum = "\",\n";
constexpr size_t kCoveredBegin = kOpening.size() + kChecksumDigits + kAfterChecksum.size();

// --- To JSON ---

Json EncodeTime(const TrainingTime& time) {
  Json json = Json::object();
  for (int i = 0; i < kTimeUnitCount; ++i) {
    const TimeUnit unit = static_cast<TimeUnit>(i);
    if (const std::optional<double> value = time.Get(unit)) {
      json[std::string(TimeUnitSuffix(unit))] = *value;
    }
  }
  return json;
}

Json EncodeSchedule(const Schedule& schedule) {
  Json json = Json::object();
  if (const auto* half_life = std::get_if<HalfLifeRule>(&schedule.rule())) {
    json["rule"] = "half_life";
    json["half_life"] = half_life->half_life.ToString();
  } else if (const auto* constant = std::get_if<ConstantDecayRule>(&schedule.rule())) {
    json["rule"] = "constant_decay";
    json["smoothing"] = constant->smoothing;
  } else {
    json["rule"] = "copy";
  }
  // "At every push" is what a schedule without an interval means; no text says it.
  if (schedule.update_interval().value != 0) {
    json["update_interval"] = schedule.update_interval().ToString();
  }
  return json;
}

Json EncodeTrack(const CheckpointTrack& track, const TrackRecord& record) {
  Json json = {{"name", track.config.name}, {"schedule", EncodeSchedule(track.config.schedule)}};
  json["state"] = {{"update_count", track.state.update_count}};
  if (track.state.last_update.has_value()) {
    json["state"]["last_update"] = EncodeTime(*track.state.last_update);
  }
  json["record"] = {{"updated", record.updated},
                    {"update_weight", static_cast<double>(record.update_weight)},
                    {"elapsed", record.elapsed},
                    {"update_count", record.update_count}};
  json["file_bytes"] = track.file_bytes;
  json["header_crc32c"] = FormatChecksum(track.header_crc32c);
  Json checksums = Json::array();
  for (const uint32_t crc : track.tensor_crc32c) checksums.push_back(FormatChecksum(crc));
  json["tensor_crc32c"] = std::move(checksums);
  return json;
}

// --- From JSON ---

absl::StatusOr<TrainingTime> ParseTime(const Fields& fields) {
  TrainingTime time;
  for (int i = 0; i < kTimeUnitCount; ++i) {
    const TimeUnit unit = static_cast<TimeUnit>(i);
    const std::string key(TimeUnitSuffix(unit));
    if (!fields.Has(key.c_str())) continue;
    EMA_ASSIGN_OR_RETURN(const double value, fields.Number(key.c_str()));
    time.Set(unit, value);
  }
  if (const absl::Status status = time.Validate(); !status.ok()) return fields.Bad(status);
  return time;
}

absl::StatusOr<TrainingDuration> ParseDuration(const Fields& fields, const char* key) {
  EMA_ASSIGN_OR_RETURN(const std::string text, fields.String(key));
  absl::StatusOr<TrainingDuration> duration = TrainingDuration::Parse(text);
  if (!duration.ok()) return fields.Bad(duration.status());
  return duration;
}

absl::StatusOr<Schedule> ParseSchedule(const Fields& fields) {
  EMA_ASSIGN_OR_RETURN(const std::string name, fields.String("rule"));
  Schedule::Rule rule = CopyRule{};
  if (name == "half_life") {
    EMA_ASSIGN_OR_RETURN(const TrainingDuration half_life, ParseDuration(fields, "half_life"));
    rule = HalfLifeRule{half_life};
  } else if (name == "constant_decay") {
    EMA_ASSIGN_OR_RETURN(const double smoothing, fields.Number("smoothing"));
    rule = ConstantDecayRule{smoothing};
  } else if (name != "copy") {
    return CorruptManifest("an unknown schedule rule");
  }
  std::optional<TrainingDuration> interval;
  if (fields.Has("update_interval")) {
    EMA_ASSIGN_OR_RETURN(interval, ParseDuration(fields, "update_interval"));
  }
  absl::StatusOr<Schedule> schedule = Schedule::Create(rule, interval);
  if (!schedule.ok()) return fields.Bad(schedule.status());
  return schedule;
}

absl::StatusOr<TrackRecord> ParseRecord(const Fields& fields) {
  TrackRecord record;
  EMA_ASSIGN_OR_RETURN(record.updated, fields.Boolean("updated"));
  EMA_ASSIGN_OR_RETURN(const double weight, fields.Number("update_weight"));
  record.update_weight = static_cast<float>(weight);
  EMA_ASSIGN_OR_RETURN(record.elapsed, fields.Number("elapsed"));
  EMA_ASSIGN_OR_RETURN(record.update_count, fields.Integer("update_count", 0));
  return record;
}

absl::StatusOr<Schedule::State> ParseState(const Fields& fields) {
  Schedule::State state;
  EMA_ASSIGN_OR_RETURN(state.update_count, fields.Integer("update_count", 0));
  if (fields.Has("last_update")) {
    EMA_ASSIGN_OR_RETURN(const Fields time, fields.Object("last_update"));
    EMA_ASSIGN_OR_RETURN(state.last_update, ParseTime(time));
  }
  return state;
}

absl::StatusOr<CheckpointTrack> ParseTrack(const Fields& fields, int64_t tensor_count) {
  EMA_ASSIGN_OR_RETURN(std::string name, fields.String("name"));
  EMA_ASSIGN_OR_RETURN(const Fields schedule_fields, fields.Object("schedule"));
  EMA_ASSIGN_OR_RETURN(const Schedule schedule, ParseSchedule(schedule_fields));
  CheckpointTrack track{.config = {std::move(name), schedule}};
  EMA_ASSIGN_OR_RETURN(const Fields state, fields.Object("state"));
  EMA_ASSIGN_OR_RETURN(track.state, ParseState(state));
  EMA_ASSIGN_OR_RETURN(track.file_bytes, fields.Integer("file_bytes", 0));
  EMA_ASSIGN_OR_RETURN(track.header_crc32c, fields.Checksum("header_crc32c"));
  EMA_ASSIGN_OR_RETURN(const Json* checksums, fields.Array("tensor_crc32c"));
  if (static_cast<int64_t>(checksums->size()) != tensor_count) {
    return CorruptManifest(absl::StrCat("track \"", track.config.name, "\" has ", checksums->size(),
                                        " checksums for ", tensor_count, " tensors"));
  }
  track.tensor_crc32c.reserve(checksums->size());
  for (const Json& checksum : *checksums) {
    const std::optional<uint32_t> crc =
        checksum.is_string() ? ParseChecksum(checksum.get_ref<const std::string&>()) : std::nullopt;
    if (!crc.has_value()) return CorruptManifest("an element of tensor_crc32c is not a CRC32C");
    track.tensor_crc32c.push_back(*crc);
  }
  return track;
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

absl::Status ParseVersion(const Fields& fields, VersionRecord& record) {
  EMA_ASSIGN_OR_RETURN(record.incarnation, fields.Integer("incarnation", 0));
  EMA_ASSIGN_OR_RETURN(record.version, fields.Integer("version", 1));
  EMA_ASSIGN_OR_RETURN(record.step, fields.Integer("step", 0));
  EMA_ASSIGN_OR_RETURN(record.run_epoch, fields.Integer("run_epoch", 0));
  EMA_ASSIGN_OR_RETURN(const int64_t commit_time_us, fields.Integer("commit_time_us", INT64_MIN));
  record.commit_time = absl::FromUnixMicros(commit_time_us);
  EMA_ASSIGN_OR_RETURN(const Fields time, fields.Object("time"));
  EMA_ASSIGN_OR_RETURN(record.time, ParseTime(time));
  return absl::OkStatus();
}

// True if the text has a checksum where this format version has it; then `is_right` says whether it
// fits.
bool HasChecksum(std::string_view text, bool& is_right) {
  if (text.size() < kCoveredBegin || text.substr(0, kOpening.size()) != kOpening ||
      text.substr(kCoveredBegin - kAfterChecksum.size(), kAfterChecksum.size()) != kAfterChecksum) {
    return false;
  }
  const std::optional<uint32_t> crc = ParseChecksum(text.substr(kOpening.size(), kChecksumDigits));
  is_right =
      crc.has_value() && *crc == Crc32c(0, std::as_bytes(std::span(text.substr(kCoveredBegin))));
  return true;
}

}  // namespace

std::string EncodeCheckpointManifest(const CheckpointManifest& manifest) {
  const VersionRecord& record = manifest.record;
  Json version = {{"incarnation", record.incarnation},
                  {"version", record.version},
                  {"step", record.step},
                  {"run_epoch", record.run_epoch},
                  {"commit_time_us", absl::ToUnixMicros(record.commit_time)},
                  {"time", EncodeTime(record.time)}};
  Json tracks = Json::array();
  for (size_t t = 0; t < manifest.tracks.size(); ++t) {
    tracks.push_back(EncodeTrack(manifest.tracks[t], record.tracks[t]));
  }
  Json tensors = Json::array();
  for (const TensorSpec& spec : manifest.manifest.tensors()) {
    tensors.push_back({{"name", spec.name},
                       {"dtype", std::string(DtypeName(spec.dtype))},
                       {"shape", spec.shape}});
  }
  const Json json = {
      {"format", std::string(kFormatName)}, {"format_version", kCheckpointFormatVersion},
      {"model", manifest.model_name},       {"max_pinned_versions", manifest.max_pinned_versions},
      {"version", std::move(version)},      {"total_bytes", manifest.total_bytes},
      {"tracks", std::move(tracks)},        {"tensors", std::move(tensors)}};
  // One member a line: readable, without a line for each of 200 000 checksums.
  std::string covered;
  for (const auto& [key, value] : json.items()) {
    absl::StrAppend(&covered, covered.empty() ? "" : ",\n", "\"", key, "\": ", value.dump());
  }
  covered += "\n}\n";
  return absl::StrCat(std::string(kOpening),
                      FormatChecksum(Crc32c(0, std::as_bytes(std::span(covered)))),
                      std::string(kAfterChecksum), covered);
}

absl::StatusOr<CheckpointManifest> ParseCheckpointManifest(std::string_view text) {
  bool is_right = false;
  const bool has_checksum = HasChecksum(text, is_right);
  if (has_checksum && !is_right) return CorruptManifest("the checksum is wrong");
  const std::optional<Json> json = ParseStrictJson(text);
  if (!json.has_value()) return CorruptManifest("it is not JSON of the right form");
  EMA_ASSIGN_OR_RETURN(const Fields fields, Fields::Of(*json, ""));
  // A later format may have its checksum elsewhere, so this comes before that is missed.
  EMA_ASSIGN_OR_RETURN(const int64_t format_version, fields.Integer("format_version", 1));
  if (format_version > kCheckpointFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat("manifest.json: written in format_version ",
                                                      format_version, "; this server reads up to ",
                                                      kCheckpointFormatVersion));
  }
  if (!has_checksum) return CorruptManifest("it has no checksum");

  CheckpointManifest manifest;
  EMA_ASSIGN_OR_RETURN(manifest.model_name, fields.String("model"));
  EMA_ASSIGN_OR_RETURN(manifest.max_pinned_versions, fields.Integer("max_pinned_versions", 1));
  EMA_ASSIGN_OR_RETURN(manifest.total_bytes, fields.Integer("total_bytes", 0));
  EMA_ASSIGN_OR_RETURN(const Json* tensors, fields.Array("tensors"));
  EMA_ASSIGN_OR_RETURN(manifest.manifest, ParseTensors(*tensors));
  EMA_ASSIGN_OR_RETURN(const Fields version, fields.Object("version"));
  EMA_RETURN_IF_ERROR(ParseVersion(version, manifest.record));
  EMA_ASSIGN_OR_RETURN(const Json* tracks, fields.Array("tracks"));
  for (const Json& element : *tracks) {
    EMA_ASSIGN_OR_RETURN(
        const Fields track,
        Fields::Of(element, absl::StrCat("tracks[", manifest.tracks.size(), "].")));
    EMA_ASSIGN_OR_RETURN(CheckpointTrack parsed,
                         ParseTrack(track, manifest.manifest.tensor_count()));
    manifest.tracks.push_back(std::move(parsed));
    EMA_ASSIGN_OR_RETURN(const Fields record_fields, track.Object("record"));
    EMA_ASSIGN_OR_RETURN(const TrackRecord record, ParseRecord(record_fields));
    manifest.record.tracks.push_back(record);
  }
  return manifest;
}

}  // namespace ema
