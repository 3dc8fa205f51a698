// SPDX-License-Identifier: Apache-2.0
#include "server/format/checkpoint_files.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "ema/error_reason.h"

namespace ema {
namespace {

std::string TensorFileStem(size_t weights) {
  return weights == 0 ? "model" : absl::StrCat("latest-", weights);
}

}  // namespace

std::string TensorFileName(size_t index, size_t count, size_t weights) {
  const std::string stem = TensorFileStem(weights);
  if (count == 1) return stem + ".safetensors";
  return absl::StrFormat("%s-%05d-of-%05d.safetensors", stem, index + 1, count);
}

std::optional<FileNumber> ParseTensorFileName(std::string_view name, size_t weights) {
  FileNumber number{.index = 0, .count = 1};
  if (name == TensorFileName(0, 1, weights)) return number;
  absl::string_view digits(name.data(), name.size());
  if (!absl::ConsumePrefix(&digits, TensorFileStem(weights) + "-") ||
      !absl::ConsumeSuffix(&digits, ".safetensors")) {
    return std::nullopt;
  }
  const std::pair<absl::string_view, absl::string_view> texts = absl::StrSplit(digits, "-of-");
  size_t position = 0;
  if (!absl::SimpleAtoi(texts.first, &position) || !absl::SimpleAtoi(texts.second, &number.count) ||
      position < 1 || position > number.count) {
    return std::nullopt;
  }
  number.index = position - 1;
  // There is one way only to write the numbers.
  if (name != TensorFileName(number.index, number.count, weights)) return std::nullopt;
  return number;
}

std::string TracksPath(std::string_view checkpoint_path) {
  return JoinPath(checkpoint_path, "tracks");
}

std::string TrackPath(std::string_view checkpoint_path, std::string_view track_name) {
  return JoinPath(TracksPath(checkpoint_path), track_name);
}

absl::Status CorruptCheckpoint(const std::string& problem) {
  return MakeError(absl::StatusCode::kDataLoss, ErrorReason::kCheckpointCorrupt, problem);
}

absl::Status ToCorruptionError(const absl::Status& status) {
  if (absl::IsNotFound(status) || absl::IsDataLoss(status) || absl::IsFailedPrecondition(status)) {
    return CorruptCheckpoint(std::string(status.message()));
  }
  return status;
}

}  // namespace ema
