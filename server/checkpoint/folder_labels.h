// SPDX-License-Identifier: Apache-2.0
//
// The labels of one model, in LABELS.json and in memory.
#ifndef EMA_SERVER_CHECKPOINT_FOLDER_LABELS_H_
#define EMA_SERVER_CHECKPOINT_FOLDER_LABELS_H_

#include <cstddef>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/checkpoint/checkpoint_index.h"
#include "server/checkpoint/folder_files.h"
#include "server/format/file_system.h"
#include "server/format/label_file.h"

namespace ema {

// Reads LABELS.json, and changes it together with the CheckpointIndex, from which readers get the
// labels. The index changes only when the file has, so a label that a reader sees survives a power
// failure.
//
// Not thread-safe: CheckpointFolder calls it under its lock. Calls block on the disk.
class FolderLabels {
 public:
  // How many labels a model can have.
  static constexpr size_t kMaxLabels = 1024;

  // Both outlive this.
  FolderLabels(FolderFiles& files, CheckpointIndex& index) : files_(files), index_(index) {}

  struct OnDisk {
    LabelMap labels;
    // DATA_LOSS: the file was corrupt, or a corrupt one was set aside earlier.
    absl::Status lost;
  };
  // Reads the label file if `listing`, a listing of the model's folder, has one. If the file is
  // corrupt, sets it aside and renames it in `listing`. Does not change the index.
  // FAILED_PRECONDITION: a newer server has written the file.
  absl::StatusOr<OnDisk> Read(std::vector<DirectoryEntry>& listing);

  // Puts `label` on its version, which the caller has found on the disk. RESOURCE_EXHAUSTED: the
  // model has kMaxLabels.
  absl::Status Put(const CheckpointLabel& label);
  // NOT_FOUND, LABEL_NOT_FOUND.
  absl::Status Remove(std::string_view label);

 private:
  absl::Status Write(LabelMap labels);

  FolderFiles& files_;
  CheckpointIndex& index_;
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_FOLDER_LABELS_H_
