// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/folder_labels.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/format/checkpoint_name.h"

namespace ema {
namespace {

absl::Status LostLabels(const std::string& why) {
  return MakeError(
      absl::StatusCode::kDataLoss, ErrorReason::kCheckpointCorrupt,
      absl::StrCat(why, "; no checkpoint of the model is removed to make room until you delete ",
                   "the set-aside file with `emactl checkpoint delete`"));
}

}  // namespace

absl::StatusOr<FolderLabels::OnDisk> FolderLabels::Read(std::vector<DirectoryEntry>& listing) {
  OnDisk result;
  for (DirectoryEntry& listed : listing) {
    if (IsSetAsideLabelFile(listed.name)) {
      result.lost = LostLabels(absl::StrCat(listed.name, " exists"));
    }
    if (listed.name != kLabelsFileName) continue;
    absl::StatusOr<LabelMap> read = files_.ReadLabels();
    if (absl::IsDataLoss(read.status())) {
      EMA_ASSIGN_OR_RETURN(listed.name,
                           files_.SetAside(std::string(kLabelsFileName), kCorruptPrefix));
      result.lost = LostLabels(std::string(read.status().message()));
      continue;
    }
    EMA_RETURN_IF_ERROR(read.status());
    result.labels = *std::move(read);
  }
  return result;
}

absl::Status FolderLabels::Put(const CheckpointLabel& label) {
  LabelMap labels = index_.labels();
  if (const auto it = labels.find(label.name); it != labels.end() && it->second == label) {
    // An earlier call may have ended between the rename and this.
    return files_.Sync();
  }
  labels[label.name] = label;
  if (labels.size() > kMaxLabels) {
    return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kBadRequest,
                     absl::StrCat("label \"", label.name, "\": the model has ", kMaxLabels,
                                  " labels, the maximum"));
  }
  return Write(std::move(labels));
}

absl::Status FolderLabels::Remove(std::string_view label) {
  EMA_RETURN_IF_ERROR(index_.FindLabel(label).status());
  LabelMap labels = index_.labels();
  labels.erase(labels.find(label));
  return Write(std::move(labels));
}

absl::Status FolderLabels::Write(LabelMap labels) {
  EMA_RETURN_IF_ERROR(files_.WriteLabels(labels));
  index_.SetLabels(std::move(labels));
  return absl::OkStatus();
}

}  // namespace ema
