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

// The format that this build writes, and the newest that it reads. A later format keeps the
// checksum as its first member, like manifest.json.
inline constexpr int64_t kLabelsFormatVersion = 1;
// Enough for 1024 labels.
inline constexpr int64_t kMaxLabelsFileBytes = int64_t{4} << 20;

using LabelMap = std::map<std::string, CheckpointLabel, std::less<>>;  // By name.

// INVALID_ARGUMENT, BAD_NAME: not a name, or digits only, which mean a version's number where
// either may be given. A file may contain such labels, but none may be made.
absl::Status ValidateNewLabel(std::string_view label);

// The file's text: JSON, whose first member is a CRC32C of all that follows, as in manifest.json.
std::string EncodeLabels(const LabelMap& labels);

// FAILED_PRECONDITION: written by a newer server; the message names both format versions.
// DATA_LOSS, CHECKPOINT_CORRUPT: the checksum is wrong, or anything is missing, doubled or out of
// range.
absl::StatusOr<LabelMap> ParseLabels(std::string_view text);

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_LABEL_FILE_H_
