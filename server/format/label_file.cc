// SPDX-License-Identifier: Apache-2.0
#include "server/format/label_file.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"
#include "server/format/checkpoint_name.h"
#include "server/format/json_file.h"
#include "server/format/record_json.h"

namespace ema {

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
  Json list = Json::array();
  for (const auto& [name, label] : labels) list.push_back(label);
  return FormatJsonFile(kLabelsFormatVersion, Json::object({{"labels", std::move(list)}}));
}

absl::StatusOr<LabelMap> ParseLabels(std::string_view text) {
  EMA_ASSIGN_OR_RETURN(const ParsedJson json,
                       ParseJsonFile(kLabelsFileName, kLabelsFormatVersion, text));
  std::vector<CheckpointLabel> list;
  JsonReader reader(json);
  reader("labels", list);
  std::string problem = reader.Problem();
  LabelMap labels;
  for (size_t i = 0; i < list.size() && problem.empty(); ++i) {
    const std::string name = list[i].name;
    if (const absl::Status status = ValidateName("label", name); !status.ok()) {
      problem = absl::StrCat("labels[", i, "]: ", status.message());
    } else if (!labels.emplace(name, std::move(list[i])).second) {
      problem = absl::StrCat("labels[", i, "].label: \"", name, "\" is there twice");
    }
  }
  if (!problem.empty()) return CorruptJsonFile(kLabelsFileName, problem);
  return labels;
}

}  // namespace ema
