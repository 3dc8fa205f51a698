// SPDX-License-Identifier: Apache-2.0
//
// The public records as JSON, in the files of a checkpoint and in the output of emactl.
//
// VisitFields() lists the fields of a record once. Writing: `Json(record)`, or a record anywhere in
// an expression that makes Json. Reading, which is strict: ReadJson().
#ifndef EMA_SERVER_FORMAT_RECORD_JSON_H_
#define EMA_SERVER_FORMAT_RECORD_JSON_H_

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ema/checkpoint_info.h"
#include "ema/manifest.h"
#include "ema/schedule.h"
#include "ema/tensor_spec.h"
#include "ema/time.h"
#include "ema/track.h"
#include "ema/version.h"
#include "ema/version_id.h"

// An absent value is null, a time RFC 3339 in UTC.
namespace nlohmann {

template <typename T>
struct adl_serializer<std::optional<T>> {
  template <typename J>
  static void to_json(J& json, const std::optional<T>& value) {
    if (value.has_value()) {
      json = *value;
    } else {
      json = nullptr;
    }
  }
};

template <>
struct adl_serializer<absl::Time> {
  template <typename J>
  static void to_json(J& json, absl::Time time) {
    json = absl::FormatTime(absl::RFC3339_full, time, absl::UTCTimeZone());
  }
};

}  // namespace nlohmann

namespace ema {

using Json = nlohmann::ordered_json;
// What a parser returns: with sorted keys, which are found fast even among very many.
using ParsedJson = nlohmann::json;

void to_json(Json& json, Dtype dtype);
void to_json(Json& json, WireDtype wire_dtype);
void to_json(Json& json, TensorAction action);
void to_json(Json& json, NonFinitePolicy policy);
void to_json(Json& json, const TrainingDuration& duration);
void to_json(Json& json, const TrainingTime& time);
void to_json(Json& json, const Schedule& schedule);
void to_json(Json& json, const Manifest& manifest);  // An array of its tensors.

// Reads a value that was written as above, and nothing else: no missing or unknown field, no value
// of another type or out of range. Returns the problem, which begins with its place, such as
// ".tracks[2].updated is not a boolean"; empty: there is none. `value` is undefined after a
// problem. Never throws.
std::string ReadJson(const ParsedJson& json, bool& value);
std::string ReadJson(const ParsedJson& json, int64_t& value, int64_t least = 0,
                     int64_t most = INT64_MAX);
std::string ReadJson(const ParsedJson& json, uint32_t& value);
std::string ReadJson(const ParsedJson& json, double& value);
std::string ReadJson(const ParsedJson& json, std::string& value);
std::string ReadJson(const ParsedJson& json, absl::Time& value);
std::string ReadJson(const ParsedJson& json, Dtype& value);
std::string ReadJson(const ParsedJson& json, WireDtype& value);
std::string ReadJson(const ParsedJson& json, TensorAction& value);
std::string ReadJson(const ParsedJson& json, NonFinitePolicy& value);
std::string ReadJson(const ParsedJson& json, TrainingDuration& value);
std::string ReadJson(const ParsedJson& json, TrainingTime& value);
std::string ReadJson(const ParsedJson& json, Schedule& value);
std::string ReadJson(const ParsedJson& json, Manifest& value);

// Reads the one of `all`, values of an enum, whose JSON is `json`, a name.
template <typename Enum>
std::string ReadName(const ParsedJson& json, std::initializer_list<Enum> all, Enum& value) {
  if (!json.is_string()) return " is not a string";
  const std::string& name = json.get_ref<const std::string&>();
  for (const Enum one : all) {
    value = one;
    if (Json(one) == Json(name)) return "";
  }
  return absl::StrCat(" is \"", name, "\", which this build does not know");
}

// A value to read into. A schedule has no default.
template <typename T>
T Blank() {
  return T();
}
template <>
inline Schedule Blank() {
  return *Schedule::Create({});
}
template <>
inline TrackConfig Blank() {
  return {.name = "", .schedule = Blank<Schedule>()};
}

template <typename T>
std::string ReadJson(const ParsedJson& json, std::optional<T>& value) {
  value.reset();
  return json.is_null() ? "" : ReadJson(json, value.emplace(Blank<T>()));
}

template <typename T>
std::string ReadJson(const ParsedJson& json, std::vector<T>& values) {
  if (!json.is_array()) return " is not an array";
  values.clear();
  for (const ParsedJson& element : json) {
    const std::string problem = ReadJson(element, values.emplace_back(Blank<T>()));
    if (!problem.empty()) return absl::StrCat("[", values.size() - 1, "]", problem);
  }
  return "";
}

// Makes a JSON object of the fields that it is called with.
class JsonWriter {
 public:
  // The bounds are for reading.
  template <typename T>
  void operator()(std::string_view key, const T& value, auto...) {
    json_[std::string(key)] = value;
  }
  // An empty list is left out.
  template <typename T>
  void IfAny(std::string_view key, const std::vector<T>& values) {
    if (!values.empty()) (*this)(key, values);
  }
  // An absent value is left out.
  template <typename T>
  void IfAny(std::string_view key, const std::optional<T>& value) {
    if (value.has_value()) (*this)(key, value);
  }

  Json Take() { return std::move(json_); }

 private:
  Json json_ = Json::object();
};

// Sets the fields that it is called with from a JSON object, until the first problem.
class JsonReader {
 public:
  // `object` outlives this.
  explicit JsonReader(const ParsedJson& object) : object_(object) {}

  // `bounds` of an integer: the least and the greatest value; without them 0 and INT64_MAX.
  template <typename T>
  void operator()(std::string_view key, T& value, auto... bounds) {
    keys_.push_back(key);
    if (!problem_.empty()) return;
    const auto it = object_.find(key);
    const std::string problem =
        it == object_.end() ? " is missing" : ReadJson(*it, value, bounds...);
    if (!problem.empty()) problem_ = absl::StrCat(".", std::string(key), problem);
  }
  template <typename T>
  void IfAny(std::string_view key, std::vector<T>& values) {
    if (object_.contains(key)) (*this)(key, values);
  }
  template <typename T>
  void IfAny(std::string_view key, std::optional<T>& value) {
    if (object_.contains(key)) (*this)(key, value);
  }

  // The first problem; a field that was not asked for is one. Empty: there is none.
  std::string Problem() const;

 private:
  const ParsedJson& object_;
  std::vector<std::string_view> keys_;  // All that this was called with.
  std::string problem_;
};

template <typename Record, typename Io>
concept HasFields = requires(Io& io, Record& record) {
  VisitFields(io, record);
};

template <typename Record>
requires HasFields<const Record, JsonWriter>
void to_json(Json& json, const Record& record) {
  JsonWriter writer;
  VisitFields(writer, record);
  json = writer.Take();
}

template <typename Record>
requires HasFields<Record, JsonReader> std::string ReadJson(const ParsedJson& json,
                                                            Record& record) {
  if (!json.is_object()) return " is not an object";
  JsonReader reader(json);
  VisitFields(reader, record);
  return reader.Problem();
}

template <typename T, typename Record>
concept MaybeConst = std::same_as<std::remove_const_t<T>, Record>;

// Limit of the stored counters (version, step, incarnation, run epoch), which the server continues.
inline constexpr int64_t kMaxStoredCount = int64_t{1} << 62;

void VisitFields(auto& io, MaybeConst<VersionId> auto& id) {
  io("version", id.version, 1);
  io("incarnation", id.incarnation);
}

void VisitFields(auto& io, MaybeConst<TrackVersion> auto& track) {
  io("track", track.track);
  io("updated", track.updated);
  io("update_weight", track.update_weight);
  io("elapsed", track.elapsed);
  io("update_count", track.update_count);
  io("averaged_count", track.averaged_count);
  io("window_steps", track.window_steps);
  io("config", track.config);
  io("stall_gap", track.stall_gap);
  io.IfAny("rules", track.rules);
}

void VisitFields(auto& io, MaybeConst<TrackStatistics> auto& statistics) {
  io("track", statistics.track);
  io("norm", statistics.norm);
  io("distance", statistics.distance);
}

void VisitFields(auto& io, MaybeConst<Version> auto& version) {
  io("incarnation", version.incarnation, 0, kMaxStoredCount);
  io("version", version.number, 1, kMaxStoredCount);
  io("step", version.step, 0, kMaxStoredCount);
  io("time", version.time);
  io("run_epoch", version.run_epoch, 0, kMaxStoredCount);
  io("commit_time", version.commit_time);
  io("tracks", version.tracks);
  io("skipped_tensor_count", version.skipped_tensor_count);
  io("skipped_tensors", version.skipped_tensors);
  io("wire_dtype", version.wire_dtype);
  io("restored_from", version.restored_from);
  io("statistics", version.statistics);
}

void VisitFields(auto& io, MaybeConst<CheckpointLabel> auto& label) {
  io("label", label.name);
  io("incarnation", label.id.incarnation);
  io("version", label.id.version, 1);
  io("step", label.step);
  io("metric", label.metric);
  io("lower_is_better", label.lower_is_better);
}

void VisitFields(auto& io, MaybeConst<TensorSpec> auto& spec) {
  io("name", spec.name);
  io("dtype", spec.dtype);
  io("shape", spec.shape);
  io("is_buffer", spec.is_buffer);
  io("aliases", spec.aliases);
}

void VisitFields(auto& io, MaybeConst<TensorRule> auto& rule) {
  io("pattern", rule.pattern);
  io("action", rule.action);
  io("schedule", rule.schedule);
}

void VisitFields(auto& io, MaybeConst<TrackConfig> auto& track) {
  io("name", track.name);
  io("schedule", track.schedule);
  io("tensor_rules", track.tensor_rules);
  io("buffers", track.buffers);
  io("dtype", track.dtype);
  io("paused", track.paused);
  io("snapshot_interval", track.snapshot_interval);
}

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_RECORD_JSON_H_
