// SPDX-License-Identifier: Apache-2.0
#include "server/format/record_json.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"

namespace ema {
namespace {

// Reads a text by `parse`, which returns a StatusOr.
template <typename T, typename Parse>
std::string ReadText(const ParsedJson& json, Parse parse, T& value) {
  std::string text;
  if (std::string problem = ReadJson(json, text); !problem.empty()) return problem;
  absl::StatusOr<T> parsed = parse(text);
  if (!parsed.ok()) return absl::StrCat(": ", parsed.status().message());
  value = *std::move(parsed);
  return "";
}

}  // namespace

void to_json(Json& json, Dtype dtype) { json = DtypeName(dtype); }

void to_json(Json& json, WireDtype wire_dtype) { json = WireDtypeName(wire_dtype); }

void to_json(Json& json, TensorAction action) { json = TensorActionName(action); }

void to_json(Json& json, NonFinitePolicy policy) { json = NonFinitePolicyName(policy); }

void to_json(Json& json, const TrainingDuration& duration) { json = duration.ToString(); }

void to_json(Json& json, const TrainingTime& time) {
  json = Json::object();
  for (int i = 0; i < kTimeUnitCount; ++i) {
    const TimeUnit unit = static_cast<TimeUnit>(i);
    const std::optional<double> value = time.Get(unit);
    if (!value.has_value()) continue;
    Json& field = json[std::string(TimeUnitField(unit))];
    if (IsCounted(unit)) {
      field = static_cast<int64_t>(*value);
    } else {
      field = *value;
    }
  }
}

void to_json(Json& json, const Schedule& schedule) {
  json = Json::object();
  for (const auto& [field, value] : schedule.ToFields()) json[field] = value;
}

void to_json(Json& json, const Manifest& manifest) { json = manifest.tensors(); }

std::string ReadJson(const ParsedJson& json, bool& value) {
  if (!json.is_boolean()) return " is not a boolean";
  value = json.get<bool>();
  return "";
}

std::string ReadJson(const ParsedJson& json, int64_t& value, int64_t least, int64_t most) {
  const bool fits =
      json.is_number_integer() && !(json.is_number_unsigned() && json.get<uint64_t>() > INT64_MAX);
  value = fits ? json.get<int64_t>() : 0;
  if (fits && value >= least && value <= most) return "";
  return absl::StrCat(" is not an integer of ", least,
                      most == INT64_MAX ? " or more" : absl::StrCat(" to ", most));
}

std::string ReadJson(const ParsedJson& json, uint32_t& value) {
  int64_t number = 0;
  std::string problem = ReadJson(json, number, 0, UINT32_MAX);
  value = static_cast<uint32_t>(number);
  return problem;
}

std::string ReadJson(const ParsedJson& json, double& value) {
  if (!json.is_number()) return " is not a number";
  value = json.get<double>();
  return "";
}

std::string ReadJson(const ParsedJson& json, std::string& value) {
  if (!json.is_string()) return " is not a string";
  value = json.get_ref<const std::string&>();
  return "";
}

std::string ReadJson(const ParsedJson& json, absl::Time& value) {
  std::string text;
  if (std::string problem = ReadJson(json, text); !problem.empty()) return problem;
  const bool is_time = absl::ParseTime(absl::RFC3339_full, text, &value, nullptr) &&
                       value != absl::InfiniteFuture() && value != absl::InfinitePast();
  return is_time ? "" : " is not a time such as 2026-01-31T12:00:00.25+00:00";
}

std::string ReadJson(const ParsedJson& json, Dtype& value) {
  return ReadText(json, ParseDtype, value);
}

std::string ReadJson(const ParsedJson& json, WireDtype& value) {
  return ReadName(json, {WireDtype::kAsPushed, WireDtype::kBFloat16}, value);
}

std::string ReadJson(const ParsedJson& json, TensorAction& value) {
  return ReadName(json, {TensorAction::kAverage, TensorAction::kCopy, TensorAction::kIgnore},
                  value);
}

std::string ReadJson(const ParsedJson& json, NonFinitePolicy& value) {
  return ReadName(json,
                  {NonFinitePolicy::kReject, NonFinitePolicy::kSkipTensor, NonFinitePolicy::kAllow},
                  value);
}

std::string ReadJson(const ParsedJson& json, TrainingDuration& value) {
  return ReadText(json, TrainingDuration::Parse, value);
}

std::string ReadJson(const ParsedJson& json, TrainingTime& value) {
  if (!json.is_object()) return " is not an object";
  JsonReader reader(json);
  value = TrainingTime();
  for (int i = 0; i < kTimeUnitCount; ++i) {
    const TimeUnit unit = static_cast<TimeUnit>(i);
    if (!json.contains(TimeUnitField(unit))) continue;
    double number = 0;
    reader(TimeUnitField(unit), number);
    value.Set(unit, number);
  }
  if (std::string problem = reader.Problem(); !problem.empty()) return problem;
  const absl::Status status = value.Validate();
  return status.ok() ? "" : absl::StrCat(": ", status.message());
}

std::string ReadJson(const ParsedJson& json, Schedule& value) {
  if (!json.is_object()) return " is not an object";
  JsonReader reader(json);
  Schedule::Fields fields;
  for (const auto& [field, text] : json.items()) {
    reader(field, fields.emplace_back(field, "").second);
  }
  if (std::string problem = reader.Problem(); !problem.empty()) return problem;
  absl::StatusOr<Schedule> schedule = Schedule::FromFields(fields);
  if (!schedule.ok()) return absl::StrCat(": ", schedule.status().message());
  value = *std::move(schedule);
  return "";
}

std::string ReadJson(const ParsedJson& json, Manifest& value) {
  std::vector<TensorSpec> tensors;
  if (std::string problem = ReadJson(json, tensors); !problem.empty()) return problem;
  absl::StatusOr<Manifest> manifest = Manifest::Create(std::move(tensors));
  if (!manifest.ok()) return absl::StrCat(": ", manifest.status().message());
  value = *std::move(manifest);
  return "";
}

std::string JsonReader::Problem() const {
  if (!problem_.empty() || keys_.size() == object_.size()) return problem_;
  for (const auto& [key, value] : object_.items()) {
    if (std::find(keys_.begin(), keys_.end(), key) == keys_.end()) {
      return absl::StrCat(".", key, " is not a field of this build");
    }
  }
  return problem_;
}

}  // namespace ema
