// SPDX-License-Identifier: Apache-2.0
#include "server/format/label_file.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"
#include "server/format/checkpoint_files.h"
#include "server/format/json_fields.h"

namespace ema {
namespace {

absl::Status Corrupt(const std::string& problem) { return absl::DataLossError(problem); }

absl::StatusOr<CheckpointLabel> ParseLabel(const Json& json) {
  EMA_ASSIGN_OR_RETURN(const Fields fields, Fields::Of(json, "labels[]."));
  CheckpointLabel label;
  EMA_ASSIGN_OR_RETURN(label.name, fields.String("name"));
  EMA_RETURN_IF_ERROR(ValidateName("label", label.name));
  EMA_ASSIGN_OR_RETURN(label.id.incarnation, fields.Integer("incarnation", 0));
  EMA_ASSIGN_OR_RETURN(label.id.version, fields.Integer("version", 1));
  EMA_ASSIGN_OR_RETURN(label.step, fields.Integer("step", 0));
  if (fields.Has("metric")) {
    EMA_ASSIGN_OR_RETURN(label.metric, fields.Number("metric"));
    if (!std::isfinite(*label.metric)) return Corrupt("a metric is not a finite number");
  }
  EMA_ASSIGN_OR_RETURN(label.lower_is_better, fields.Boolean("lower_is_better"));
  return label;
}

absl::StatusOr<LabelMap> ParseJson(std::string_view text) {
  if (!HasRightChecksum(text)) return Corrupt("the checksum is wrong, or missing");
  const std::optional<Json> json = ParseStrictJson(text);
  if (!json.has_value()) return Corrupt("it is not JSON of the right form");
  EMA_ASSIGN_OR_RETURN(const Fields fields, Fields::Of(*json, ""));
  EMA_ASSIGN_OR_RETURN(const int64_t format_version, fields.Integer("format_version", 1));
  if (format_version > kLabelsFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat("LABELS.json: written in format_version ",
                                                      format_version, "; this server reads up to ",
                                                      kLabelsFormatVersion));
  }
  EMA_ASSIGN_OR_RETURN(const Json* array, fields.Array("labels"));
  LabelMap labels;
  for (const Json& element : *array) {
    EMA_ASSIGN_OR_RETURN(CheckpointLabel label, ParseLabel(element));
    const std::string name = label.name;
    if (!labels.emplace(name, std::move(label)).second) return Corrupt("a label is given twice");
  }
  return labels;
}

}  // namespace

absl::Status ValidateNewLabel(std::string_view label) {
  EMA_RETURN_IF_ERROR(ValidateName("label", label));
  if (!std::all_of(label.begin(), label.end(), absl::ascii_isdigit)) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, ErrorReason::kBadName,
      absl::StrCat("label \"", std::string(label),
                   "\": must not be digits only, which are a version's number; take one "
                   "such as \"epoch-2\""));
}

std::string EncodeLabels(const LabelMap& labels) {
  std::string covered =
      absl::StrCat("\"format_version\": ", kLabelsFormatVersion, ",\n\"labels\": [");
  for (const auto& [name, label] : labels) {
    Json json = {{"name", name},
                 {"incarnation", label.id.incarnation},
                 {"version", label.id.version},
                 {"step", label.step},
                 {"lower_is_better", label.lower_is_better}};
    if (label.metric.has_value()) json["metric"] = *label.metric;
    absl::StrAppend(&covered, covered.back() == '[' ? "\n" : ",\n", json.dump());
  }
  covered += "]\n}\n";
  return AddChecksum(covered);
}

absl::StatusOr<LabelMap> ParseLabels(std::string_view text) {
  absl::StatusOr<LabelMap> labels = ParseJson(text);
  if (labels.ok() || absl::IsFailedPrecondition(labels.status())) return labels;
  // Names and types that are wrong are the file's fault, whatever their checks call it. Fields
  // speak of the file that they were made for.
  return CorruptCheckpoint(absl::StrCat(
      "LABELS.json: ", absl::StripPrefix(labels.status().message(), "manifest.json: ")));
}

}  // namespace ema
