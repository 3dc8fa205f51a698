// SPDX-License-Identifier: Apache-2.0
#include "server/format/track_json.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

Json EncodeSchedule(const Schedule& schedule) {
  Json json = Json::object();
  for (const auto& [field, value] : schedule.ToFields()) json[field] = value;
  return json;
}

absl::StatusOr<TensorAction> ParseAction(const Fields& fields, const char* key) {
  EMA_ASSIGN_OR_RETURN(const std::string name, fields.String(key));
  if (const std::optional<TensorAction> action = ParseTensorAction(name)) return *action;
  return CorruptManifest(absl::StrCat("an unknown ", key));
}

absl::StatusOr<Schedule> ParseSchedule(const Fields& fields, const std::string& key) {
  EMA_ASSIGN_OR_RETURN(const Fields place, fields.Object(key));
  EMA_ASSIGN_OR_RETURN(const Json* json, fields.Get(key));
  Schedule::Fields schedule_fields;
  for (const auto& [field, value] : json->items()) {
    if (!value.is_string()) return CorruptManifest("a field of a schedule is not a string");
    schedule_fields.emplace_back(field, value.get<std::string>());
  }
  absl::StatusOr<Schedule> schedule = Schedule::FromFields(schedule_fields);
  if (!schedule.ok()) return place.Bad(schedule.status());
  return schedule;
}

}  // namespace

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

Json EncodeState(const Schedule::State& state) {
  Json json = {{"update_count", state.update_count}, {"averaged_count", state.averaged_count}};
  if (state.last_update.has_value()) json["last_update"] = EncodeTime(*state.last_update);
  if (state.started.has_value()) json["started"] = EncodeTime(*state.started);
  return json;
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
  if (!state.last_update.has_value() && (state.started.has_value() || state.update_count > 0)) {
    return fields.Bad(absl::InvalidArgumentError("updates without a last_update"));
  }
  return state;
}

Json EncodeRecord(const TrackVersion& record) {
  Json json = {{"track", record.track},
               {"updated", record.updated},
               {"update_weight", record.update_weight},
               {"elapsed", record.elapsed},
               {"update_count", record.update_count},
               {"averaged_count", record.averaged_count},
               {"window_steps", record.window_steps},
               {"config", record.config},
               {"stall_gap", record.stall_gap}};
  for (const TrackVersion& rule : record.rules) json["rules"].push_back(EncodeRecord(rule));
  return json;
}

absl::StatusOr<TrackVersion> ParseRecord(const Fields& fields) {
  TrackVersion record;
  EMA_ASSIGN_OR_RETURN(record.track, fields.String("track"));
  EMA_ASSIGN_OR_RETURN(record.updated, fields.Boolean("updated"));
  EMA_ASSIGN_OR_RETURN(record.update_weight, fields.Number("update_weight"));
  EMA_ASSIGN_OR_RETURN(record.elapsed, fields.Number("elapsed"));
  EMA_ASSIGN_OR_RETURN(record.update_count, fields.Integer("update_count", 0));
  record.averaged_count = record.update_count;
  if (fields.Has("averaged_count")) {
    EMA_ASSIGN_OR_RETURN(record.averaged_count, fields.Integer("averaged_count", 0));
  }
  EMA_ASSIGN_OR_RETURN(record.window_steps, fields.Number("window_steps"));
  EMA_ASSIGN_OR_RETURN(record.config, fields.String("config"));
  EMA_ASSIGN_OR_RETURN(record.stall_gap, fields.Number("stall_gap"));
  if (!fields.Has("rules")) return record;
  EMA_RETURN_IF_ERROR(fields.ForEachObject("rules", [&](const Fields& rule) -> absl::Status {
    EMA_ASSIGN_OR_RETURN(record.rules.emplace_back(), ParseRecord(rule));
    return absl::OkStatus();
  }));
  return record;
}

}  // namespace ema
