// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/manifest_json.h"

#include <functional>
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
  for (const auto& [field, value] : schedule.ToFields()) json[field] = value;
  return json;
}

Json EncodeConfig(const TrackConfig& config) {
  Json json = {{"name", config.name}, {"schedule", EncodeSchedule(config.schedule)}};
  Json rules = Json::array();
  for (const TensorRule& rule : config.tensor_rules) {
    rules.push_back(
        {{"pattern", rule.pattern}, {"action", std::string(TensorActionName(rule.action))}});
    if (rule.schedule.has_value()) rules.back()["schedule"] = EncodeSchedule(*rule.schedule);
  }
  json["tensor_rules"] = std::move(rules);
  json["buffers"] = std::string(TensorActionName(config.buffers));
  json["compensated"] = config.compensated;
  json["paused"] = config.paused;
  if (config.snapshot_interval.has_value()) {
    json["snapshot_interval"] = config.snapshot_interval->ToString();
  }
  return json;
}

Json EncodeState(const Schedule::State& state) {
  Json json = {{"update_count", state.update_count}, {"averaged_count", state.averaged_count}};
  if (state.last_update.has_value()) json["last_update"] = EncodeTime(*state.last_update);
  if (state.started.has_value()) json["started"] = EncodeTime(*state.started);
  return json;
}

Json EncodeRecord(const TrackRecord& record) {
  Json json = {{"track", record.track},
               {"updated", record.updated},
               {"update_weight", record.update_weight},
               {"elapsed", record.elapsed},
               {"update_count", record.update_count},
               {"window_steps", record.window_steps},
               {"config", record.config},
               {"stall_gap", record.stall_gap}};
  for (const TrackRecord& rule : record.rules) json["rules"].push_back(EncodeRecord(rule));
  return json;
}

Json EncodeFile(const CheckpointFile& file) {
  Json json = {{"file_bytes", file.file_bytes},
               {"header_crc32c", FormatChecksum(file.header_crc32c)}};
  Json checksums = Json::array();
  for (const uint32_t crc : file.tensor_crc32c) checksums.push_back(FormatChecksum(crc));
  json["tensor_crc32c"] = std::move(checksums);
  return json;
}

Json EncodeTrack(const CheckpointTrack& track) {
  Json states = Json::array();
  for (size_t i = 0; i < track.state.size(); ++i) {
    states.push_back(EncodeState(track.state[i]));
    states.back()["last_step"] = track.last_steps[i];
  }
  Json json = {{"config", EncodeConfig(track.config)}, {"states", std::move(states)}};
  if (track.weights.has_value()) json["weights"] = EncodeFile(*track.weights);
  if (track.low_parts.has_value()) json["low_parts"] = EncodeFile(*track.low_parts);
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

// Calls `parse` for each object of an array.
absl::Status ForEachObject(const Fields& fields, const std::string& key,
                           const std::function<absl::Status(const Fields&)>& parse) {
  EMA_ASSIGN_OR_RETURN(const Json* elements, fields.Array(key));
  for (size_t i = 0; i < elements->size(); ++i) {
    EMA_ASSIGN_OR_RETURN(const Fields element,
                         Fields::Of((*elements)[i], absl::StrCat(key, "[", i, "].")));
    EMA_RETURN_IF_ERROR(parse(element));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ParseTexts(const Fields& fields, const char* key) {
  EMA_ASSIGN_OR_RETURN(const Json* elements, fields.Array(key));
  std::vector<std::string> texts;
  for (const Json& element : *elements) {
    if (!element.is_string()) return CorruptManifest(absl::StrCat("one of ", key, " is no text"));
    texts.push_back(element.get<std::string>());
  }
  return texts;
}

absl::StatusOr<TensorAction> ParseAction(const Fields& fields, const char* key) {
  EMA_ASSIGN_OR_RETURN(const std::string name, fields.String(key));
  for (const TensorAction action :
       {TensorAction::kAverage, TensorAction::kCopy, TensorAction::kIgnore}) {
    if (name == TensorActionName(action)) return action;
  }
  return CorruptManifest(absl::StrCat("an unknown ", key));
}

absl::StatusOr<Schedule> ParseSchedule(const Fields& fields, const std::string& key) {
  EMA_ASSIGN_OR_RETURN(const Fields place, fields.Object(key));
  EMA_ASSIGN_OR_RETURN(const Json* json, fields.Get(key));
  Schedule::Fields schedule_fields;
  for (const auto& [field, value] : json->items()) {
    if (!value.is_string()) return CorruptManifest("a field of a schedule is no text");
    schedule_fields.emplace_back(field, value.get<std::string>());
  }
  absl::StatusOr<Schedule> schedule = Schedule::FromFields(schedule_fields);
  if (!schedule.ok()) return place.Bad(schedule.status());
  return schedule;
}

absl::StatusOr<TrackConfig> ParseConfig(const Fields& fields) {
  EMA_ASSIGN_OR_RETURN(std::string name, fields.String("name"));
  EMA_ASSIGN_OR_RETURN(const Schedule schedule, ParseSchedule(fields, "schedule"));
  TrackConfig config{.name = std::move(name), .schedule = schedule};
  EMA_ASSIGN_OR_RETURN(const Json* rules, fields.Array("tensor_rules"));
  for (const Json& element : *rules) {
    EMA_ASSIGN_OR_RETURN(const Fields rule, Fields::Of(element, "tensor_rules[]."));
    TensorRule& parsed = config.tensor_rules.emplace_back();
    EMA_ASSIGN_OR_RETURN(parsed.pattern, rule.String("pattern"));
    EMA_ASSIGN_OR_RETURN(parsed.action, ParseAction(rule, "action"));
    if (rule.Has("schedule")) {
      EMA_ASSIGN_OR_RETURN(parsed.schedule, ParseSchedule(rule, "schedule"));
    }
  }
  EMA_ASSIGN_OR_RETURN(config.buffers, ParseAction(fields, "buffers"));
  EMA_ASSIGN_OR_RETURN(config.compensated, fields.Boolean("compensated"));
  EMA_ASSIGN_OR_RETURN(config.paused, fields.Boolean("paused"));
  if (fields.Has("snapshot_interval")) {
    EMA_ASSIGN_OR_RETURN(const std::string text, fields.String("snapshot_interval"));
    const absl::StatusOr<TrainingDuration> interval = TrainingDuration::Parse(text);
    if (!interval.ok()) return fields.Bad(interval.status());
    config.snapshot_interval = *interval;
  }
  return config;
}

absl::StatusOr<TrackRecord> ParseRecord(const Fields& fields) {
  TrackRecord record;
  EMA_ASSIGN_OR_RETURN(record.track, fields.String("track"));
  EMA_ASSIGN_OR_RETURN(record.updated, fields.Boolean("updated"));
  EMA_ASSIGN_OR_RETURN(record.update_weight, fields.Number("update_weight"));
  EMA_ASSIGN_OR_RETURN(record.elapsed, fields.Number("elapsed"));
  EMA_ASSIGN_OR_RETURN(record.update_count, fields.Integer("update_count", 0));
  EMA_ASSIGN_OR_RETURN(record.window_steps, fields.Number("window_steps"));
  EMA_ASSIGN_OR_RETURN(record.config, fields.String("config"));
  EMA_ASSIGN_OR_RETURN(record.stall_gap, fields.Number("stall_gap"));
  if (!fields.Has("rules")) return record;
  EMA_RETURN_IF_ERROR(ForEachObject(fields, "rules", [&](const Fields& rule) -> absl::Status {
    EMA_ASSIGN_OR_RETURN(record.rules.emplace_back(), ParseRecord(rule));
    return absl::OkStatus();
  }));
  return record;
}

absl::StatusOr<Schedule::State> ParseState(const Fields& fields) {
  Schedule::State state;
  EMA_ASSIGN_OR_RETURN(state.update_count, fields.Integer("update_count", 0));
  EMA_ASSIGN_OR_RETURN(state.averaged_count, fields.Integer("averaged_count", 0));
  if (fields.Has("last_update")) {
    EMA_ASSIGN_OR_RETURN(const Fields time, fields.Object("last_update"));
    EMA_ASSIGN_OR_RETURN(state.last_update, ParseTime(time));
  }
  if (fields.Has("started")) {
    EMA_ASSIGN_OR_RETURN(const Fields time, fields.Object("started"));
    EMA_ASSIGN_OR_RETURN(state.started, ParseTime(time));
  }
  return state;
}

absl::StatusOr<CheckpointFile> ParseFile(const Fields& fields, int64_t tensor_count) {
  CheckpointFile file;
  EMA_ASSIGN_OR_RETURN(file.file_bytes, fields.Integer("file_bytes", 0));
  EMA_ASSIGN_OR_RETURN(file.header_crc32c, fields.Checksum("header_crc32c"));
  EMA_ASSIGN_OR_RETURN(const Json* checksums, fields.Array("tensor_crc32c"));
  if (static_cast<int64_t>(checksums->size()) != tensor_count) {
    return CorruptManifest(absl::StrCat("a file has ", checksums->size(), " checksums for ",
                                        tensor_count, " tensors"));
  }
  file.tensor_crc32c.reserve(checksums->size());
  for (const Json& checksum : *checksums) {
    const std::optional<uint32_t> crc =
        checksum.is_string() ? ParseChecksum(checksum.get_ref<const std::string&>()) : std::nullopt;
    if (!crc.has_value()) return CorruptManifest("an element of tensor_crc32c is not a CRC32C");
    file.tensor_crc32c.push_back(*crc);
  }
  return file;
}

// What the track's files have, put into `track`.
absl::StatusOr<CheckpointTrack> ParseFiles(const Fields& fields, int64_t tensor_count,
                                           CheckpointTrack track) {
  if (!fields.Has("weights")) return track;
  EMA_ASSIGN_OR_RETURN(const Fields weights, fields.Object("weights"));
  EMA_ASSIGN_OR_RETURN(track.weights, ParseFile(weights, tensor_count));
  if (track.config.compensated) {
    EMA_ASSIGN_OR_RETURN(const Fields low_parts, fields.Object("low_parts"));
    EMA_ASSIGN_OR_RETURN(track.low_parts, ParseFile(low_parts, tensor_count));
  }
  return track;
}

absl::StatusOr<CheckpointTrack> ParseTrack(const Fields& fields, int64_t tensor_count) {
  EMA_ASSIGN_OR_RETURN(const Fields config_fields, fields.Object("config"));
  EMA_ASSIGN_OR_RETURN(TrackConfig config, ParseConfig(config_fields));
  CheckpointTrack track{.config = std::move(config)};
  if (!fields.Has("states")) {  // Format 1.
    EMA_ASSIGN_OR_RETURN(const Fields state, fields.Object("state"));
    EMA_ASSIGN_OR_RETURN(const int64_t last_step, fields.Integer("last_step", 0));
    // Without weights it had no updates, and states are of updates.
    if (fields.Has("weights")) {
      EMA_ASSIGN_OR_RETURN(track.state.emplace_back(), ParseState(state));
      track.last_steps = {last_step};
    }
    return ParseFiles(fields, tensor_count, std::move(track));
  }
  EMA_RETURN_IF_ERROR(ForEachObject(fields, "states", [&](const Fields& state) -> absl::Status {
    EMA_ASSIGN_OR_RETURN(track.state.emplace_back(), ParseState(state));
    EMA_ASSIGN_OR_RETURN(track.last_steps.emplace_back(), state.Integer("last_step", 0));
    return absl::OkStatus();
  }));
  const size_t schedule_count = SchedulesOf(track.config).size();
  if (!track.state.empty() && track.state.size() != schedule_count) {
    return CorruptManifest(absl::StrCat("track \"", track.config.name, "\" has ", schedule_count,
                                        " schedules and ", track.state.size(), " states"));
  }
  return ParseFiles(fields, tensor_count, std::move(track));
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
    EMA_ASSIGN_OR_RETURN(spec.aliases, ParseTexts(fields, "aliases"));
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
  EMA_RETURN_IF_ERROR(
      ForEachObject(fields, "tracks", [&record](const Fields& track) -> absl::Status {
        EMA_ASSIGN_OR_RETURN(TrackRecord parsed, ParseRecord(track));
        record.tracks.push_back(std::move(parsed));
        return absl::OkStatus();
      }));
  EMA_ASSIGN_OR_RETURN(record.skipped_tensor_count, fields.Integer("skipped_tensor_count", 0));
  EMA_ASSIGN_OR_RETURN(record.skipped_tensors, ParseTexts(fields, "skipped_tensors"));
  // Manifests of before do not have it.
  if (fields.Has("wire_dtype")) {
    EMA_ASSIGN_OR_RETURN(const std::string name, fields.String("wire_dtype"));
    record.wire_dtype =
        name == WireDtypeName(WireDtype::kBFloat16) ? WireDtype::kBFloat16 : WireDtype::kAsPushed;
  }
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
                  {"time", EncodeTime(record.time)},
                  {"tracks", Json::array()},
                  {"skipped_tensor_count", record.skipped_tensor_count},
                  {"skipped_tensors", record.skipped_tensors},
                  {"wire_dtype", WireDtypeName(record.wire_dtype)}};
  for (const TrackRecord& track : record.tracks) version["tracks"].push_back(EncodeRecord(track));
  Json created_tracks = Json::array();
  for (const TrackConfig& track : manifest.created_tracks) {
    created_tracks.push_back(EncodeConfig(track));
  }
  Json tracks = Json::array();
  for (const CheckpointTrack& track : manifest.tracks) tracks.push_back(EncodeTrack(track));
  Json tensors = Json::array();
  for (const TensorSpec& spec : manifest.manifest.tensors()) {
    tensors.push_back({{"name", spec.name},
                       {"dtype", std::string(DtypeName(spec.dtype))},
                       {"shape", spec.shape},
                       {"is_buffer", spec.is_buffer},
                       {"aliases", spec.aliases}});
  }
  const Json json = {{"format", std::string(kFormatName)},
                     {"format_version", kCheckpointFormatVersion},
                     {"model", manifest.model_name},
                     {"max_pinned_versions", manifest.max_pinned_versions},
                     {"non_finite", static_cast<int>(manifest.non_finite)},
                     {"version", std::move(version)},
                     {"total_bytes", manifest.total_bytes},
                     {"created_tracks", std::move(created_tracks)},
                     {"tracks", std::move(tracks)},
                     {"tensors", std::move(tensors)}};
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
  EMA_ASSIGN_OR_RETURN(const int64_t non_finite, fields.Integer("non_finite", 1));
  if (non_finite > static_cast<int64_t>(NonFinitePolicy::kAllow)) {
    return CorruptManifest("an unknown non_finite");
  }
  manifest.non_finite = static_cast<NonFinitePolicy>(non_finite);
  EMA_RETURN_IF_ERROR(
      ForEachObject(fields, "created_tracks", [&](const Fields& track) -> absl::Status {
        EMA_ASSIGN_OR_RETURN(TrackConfig config, ParseConfig(track));
        manifest.created_tracks.push_back(std::move(config));
        return absl::OkStatus();
      }));
  EMA_RETURN_IF_ERROR(ForEachObject(fields, "tracks", [&](const Fields& track) -> absl::Status {
    EMA_ASSIGN_OR_RETURN(CheckpointTrack parsed,
                         ParseTrack(track, manifest.manifest.tensor_count()));
    manifest.tracks.push_back(std::move(parsed));
    return absl::OkStatus();
  }));
  return manifest;
}

}  // namespace ema
