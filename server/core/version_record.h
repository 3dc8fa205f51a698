// SPDX-License-Identifier: Apache-2.0
//
// How a version came about: what is said of it wherever its weights are.
#ifndef EMA_SERVER_CORE_VERSION_RECORD_H_
#define EMA_SERVER_CORE_VERSION_RECORD_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ema/statistics.h"
#include "ema/tensor_spec.h"
#include "ema/time.h"
#include "ema/version_id.h"

namespace ema {

// Mirrors ema.v1.TrackRecord, which says what each field means.
struct TrackRecord {
  std::string track;
  bool updated = false;
  double update_weight = 0;
  double elapsed = 0;
  int64_t update_count = 0;
  double window_steps = 0;
  std::string config;
  double stall_gap = 0;
  // Of the tensor rules that have a schedule, in their order.
  std::vector<TrackRecord> rules;
};

// Mirrors ema.v1.VersionRecord.
struct VersionRecord {
  int64_t incarnation = 0;
  int64_t version = 0;
  int64_t step = 0;
  TrainingTime time;
  int64_t run_epoch = 0;
  std::vector<TrackRecord> tracks;
  absl::Time commit_time;
  int64_t skipped_tensor_count = 0;
  std::vector<std::string> skipped_tensors;  // Some of their names.
  WireDtype wire_dtype = WireDtype::kAsPushed;
  // Not a push made it, but a rollback to this version.
  std::optional<VersionId> restored_from;
  // Of some tracks, in any order.
  std::vector<TrackStatistics> statistics;

  VersionId id() const { return {version, incarnation}; }
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_VERSION_RECORD_H_
