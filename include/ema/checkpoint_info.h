// SPDX-License-Identifier: Apache-2.0
//
// Descriptions of checkpoints and labels, and results of calls about them.
#ifndef EMA_CHECKPOINT_INFO_H_
#define EMA_CHECKPOINT_INFO_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ema/version.h"
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
  std::optional<double> metric;  // The score that moved it here; absent: SetLabel() set it.
  bool lower_is_better = false;

  friend bool operator==(const CheckpointLabel&, const CheckpointLabel&) = default;
};

struct CheckpointList {
  std::vector<CheckpointInfo> checkpoints;  // Newest first.
  std::vector<CheckpointLabel> labels;      // Sorted by name.
};

// The result of ReportMetric.
struct MetricResult {
  CheckpointLabel label;  // The label after the call.
  bool moved = false;     // This call moved it. May be false if the client retried the call.
};

// ema.v1.SynthesizeResponse says what each field means.
struct Synthesis {
  struct Source {
    std::string track;
    int64_t step = 0;
    double weight = 0;
  };
  Version version;
  double residual = 0;
  std::vector<Source> sources;
};

}  // namespace ema

#endif  // EMA_CHECKPOINT_INFO_H_
