// SPDX-License-Identifier: Apache-2.0
//
// LABELS.json: the names that versions of a model have.
#ifndef EMA_SERVER_FORMAT_LABEL_FILE_H_
#define EMA_SERVER_FORMAT_LABEL_FILE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/checkpoint_info.h"

namespace ema {

// The format that this build writes and reads.
inline constexpr int64_t kLabelsFormatVersion = 2;
// Enough for 1024 labels.
inline constexpr int64_t kMaxLabelsFileBytes = int64_t{4} << 20;

using LabelMap = std::map<std::string, CheckpointLabel, std::less<>>;  // By name.

// INVALID_ARGUMENT, BAD_NAME: the label is not a valid name, or has digits only. (Where a label or
// a version may be given, digits are a version's number.) ParseLabels() accepts labels of digits,
// but new ones are rejected.
absl::Status ValidateNewLabel(std::string_view label);

// The text of a file as json_file.h says.
std::string EncodeLabels(const LabelMap& labels);

// Errors as ParseCheckpointManifest().
absl::StatusOr<LabelMap> ParseLabels(std::string_view text);

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_LABEL_FILE_H_
