// SPDX-License-Identifier: Apache-2.0
//
// What a server tells of the versions on its disk, and what it is told of a trainer that goes on
// from one of its own.
#ifndef EMA_CHECKPOINT_INFO_H_
#define EMA_CHECKPOINT_INFO_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ema/time.h"
#include "ema/version_id.h"

namespace ema {

// ema.v1.Checkpoint says what each field means.
struct CheckpointInfo {
  enum class State { kSaving = 1, kComplete = 2, kFailed = 3, kCorrupt = 4 };
  std::string name;
  State state = State::kComplete;
  VersionId id;
  int64_t step = 0;
  absl::Time commit_time = absl::UnixEpoch();
  std::vector<std::string> tracks;
  bool is_partial = false;
  int64_t total_bytes = 0;
  std::vector<std::string> labels;
  std::string problem;
};

// A name for a version on the disk.
struct CheckpointLabel {
  std::string name;
  VersionId id;
  int64_t step = 0;
  std::optional<double> metric;  // The score that put it there; absent: a person did.
  bool lower_is_better = false;

  friend bool operator==(const CheckpointLabel&, const CheckpointLabel&) = default;
};

// Where a trainer stands that goes on from a checkpoint of its own.
struct ResumePoint {
  int64_t step = 0;
  // The average that belongs to it, of that step or an earlier one. Absent: what an uninterrupted
  // run would have after `step`.
  std::optional<VersionId> version;
  // Training time at `step`: tells the server, without `version`, whether an update was due.
  std::optional<TrainingTime> time;
};

}  // namespace ema

#endif  // EMA_CHECKPOINT_INFO_H_
