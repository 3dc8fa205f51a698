// SPDX-License-Identifier: Apache-2.0
//
// The labels of one model, and the scores that move them.
#ifndef EMA_SERVER_CHECKPOINT_MODEL_LABELS_H_
#define EMA_SERVER_CHECKPOINT_MODEL_LABELS_H_

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "ema/checkpoint_info.h"
#include "server/checkpoint/model_saver.h"
#include "server/checkpoint/stored_versions.h"
#include "server/core/checkpoints.h"

namespace ema {

// Sets, moves and removes the labels of one model, each on a version that is on the disk.
//
// Thread-safe. Calls block on the disk.
class ModelLabels {
 public:
  // `saver` outlives this.
  ModelLabels(const ModelContext& context, ModelSaver& saver)
      : context_(context), versions_(context), saver_(saver) {}

  // Checkpoints::SetLabel(), RemoveLabel() and ReportMetric().
  absl::StatusOr<CheckpointLabel> Set(const std::string& label, const VersionId& id)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Remove(const std::string& label) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<MetricResult> Report(const CheckpointLabel& score) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // Puts `label` on a version, and saves the version if it is not on the disk; `id` as in
  // Checkpoints::SaveRequest.
  absl::StatusOr<CheckpointLabel> PlaceLocked(CheckpointLabel label, const VersionId& id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // RESOURCE_EXHAUSTED: no more labels can be made by scores.
  absl::Status CheckMayScore(const CheckpointLabel& score) const;
  absl::Status BadScore(const CheckpointLabel& score, const std::string& why) const;

  const ModelContext context_;
  const StoredVersions versions_;
  ModelSaver& saver_;
  // Serializes changes, which read before they write: held while waiting for the disk.
  absl::Mutex mu_;
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_MODEL_LABELS_H_
